"""A program and its chosen strategies as one per-device program with explicit collectives."""
