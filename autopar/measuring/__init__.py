"""Measures the calls of a step while they run: by JAX's profiler, and in stages by their own instructions too."""
