"""The flags of each command, a file for each, and those that several share. Nothing here imports JAX."""
