"""What XLA's CPU compiler makes of primitives: a table of its own, which prices and the memory model read."""
