"""What crosses into a trace beside arrays: static leaves, objects of flax.nnx, and what a step changes in place."""
