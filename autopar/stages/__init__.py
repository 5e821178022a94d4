"""A step cut into layers and pipeline stages: the forward chain, where it is cut, what follows it, and recomputation."""
