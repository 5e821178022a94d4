"""What runs: a compiled step on one mesh, a compiled pipeline, and a plan's shardings for plain jax.jit."""
