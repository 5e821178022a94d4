"""Measures the calls of a step while they run: by its own instructions in stages, by JAX's profiler on one mesh."""
