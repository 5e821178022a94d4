"""Executes a plan; never imports a compiler pass."""
