"""The choice of stages, of layers and submeshes whose costs are known: a dynamic program that knows nothing of programs."""
