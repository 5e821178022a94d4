"""Example models with their train steps and data, as a user would write them.

Nothing here imports the rest of autopar: every step is an ordinary function for `jax.jit`, and serves as proof that
user code needs no change. `build("gpt", layers=2)` gives the step, the state's constructor and real data for one
model.
"""

from autopar.models.registry import MODELS, BuiltModel, ModelEntry, build

__all__ = ["MODELS", "BuiltModel", "ModelEntry", "build"]
