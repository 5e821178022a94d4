"""A row's plan, stated on the leaves of a part's step.

In: a part, the shapes of its state, the mesh's axes, the ZeRO stage. Out: `Constraints`: samples split over the data (and expert)
axes, tokens over the tensor axis under sequence parallelism, matrices as in Megatron, experts over theirs; with ZeRO 2 and more
gradients, unless they are reduced once a step, with ZeRO 3 parameters too, over the data axis. Nothing inside the part is stated.
What can go wrong: a leaf whose sizes the axes do not divide; it stays whole.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from autopar.layouts.constraints import Constraints, Rule, SplitBatch
from autopar.program.call import PyTree
from autopar.simulate.closed_forms.job_prediction import Part
from autopar.simulate.closed_forms.transformer_shape import TransformerShape

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
# How Megatron splits each matrix, and `residual_network` each convolution, by its place in the model; what is not listed is
# whole on every tensor rank.
_SPLIT: Mapping[str, tuple[str | None, ...]] = {
    "*/qkv/kernel": (None, None, TENSOR, None),
    "*/qkv/bias": (None, TENSOR, None),
    "*/query/kernel": (None, TENSOR, None),
    "*/query/bias": (TENSOR, None),
    "*/key/kernel": (None, TENSOR, None),
    "*/key/bias": (TENSOR, None),
    "*/value/kernel": (None, TENSOR, None),
    "*/value/bias": (TENSOR, None),
    "*/out/kernel": (TENSOR, None, None),
    "*/up/kernel": (None, TENSOR),
    "*/up/bias": (TENSOR,),
    "*/ffn/gate/kernel": (None, TENSOR),
    "*/down/kernel": (TENSOR, None),
    "*/moe/up": (EXPERT, None, TENSOR),
    "*/moe/down": (EXPERT, TENSOR, None),
    "*/tokens/embedding": (TENSOR, None),
    "*/output_bias": (TENSOR,),
    "*/vocabulary/kernel": (None, TENSOR),
    "*/conv_in/kernel": (None, None, TENSOR, None),
    "*/conv_mid/kernel": (None, None, None, TENSOR),
    "*/norm_mid/*": (TENSOR,),
    "*/conv_out/kernel": (None, None, TENSOR, None),
    "*/conv_skip/kernel": (None, None, TENSOR, None),
}


def plan_constraints(
    part: Part,
    state: Mapping[str, PyTree],
    axes: Mapping[str, int],
    *,
    zero_stage: int,
    whole_gradients: bool = False,
) -> Constraints:
    """The row's plan, leaf by leaf. `whole_gradients`: each data rank adds up all of them, whatever the ZeRO stage."""
    samples = tuple(name for name in (DATA, EXPERT) if axes.get(name, 1) > 1)
    spread = TENSOR if part.split.sequence_parallel and TENSOR in axes else None
    images = not isinstance(part.shape, TransformerShape)  # of which channels are spread, as tokens of texts are
    rest = (None, None, spread) if images else (spread, None)
    # Between the ranks of a mixture samples change places, so only what enters and leaves it is split by them.
    moved = part.kind == "expert" and EXPERT in samples
    between = PartitionSpec(samples, *rest) if moved else SplitBatch(samples, PartitionSpec(*rest))
    rules = [Rule(glob=f"state/{place}/*", layout=between, must_match=False) for place in ("taken", "given")]
    rules.append(Rule(glob="state/ids/*", layout=SplitBatch(samples), must_match=False))
    for place, divided in (("params", zero_stage >= 3), ("grads", zero_stage >= 2 and not whole_gradients)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(state[place])[0]:
            name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
            matrix = _matrix_spec(name, leaf.shape, axes)
            spec = _over_data(matrix, leaf.shape, axes) if divided else matrix
            rules.append(Rule(glob=f"state/{place}/{name}", layout=PartitionSpec(*spec)))
    return Constraints(tuple(rules))


def _matrix_spec(name: str, shape: Sequence[int], axes: Mapping[str, int]) -> tuple[str | None, ...]:
    """Where Megatron splits a leaf, as far as its sizes allow: fewer key-value heads than tensor ranks stay whole."""
    found = next((spec for glob, spec in _SPLIT.items() if fnmatch.fnmatchcase(f"/{name}", glob)), (None,) * len(shape))
    lengths = [axes.get(axis, 1) if axis else 1 for axis in found]
    return tuple(
        axis if length > 1 and size % length == 0 else None
        for axis, length, size in zip(found, lengths, shape, strict=True)
    )


def _over_data(
    spec: Sequence[str | None], shape: Sequence[int], axes: Mapping[str, int]
) -> tuple[str | tuple[str, ...] | None, ...]:
    """The same with the first dimension that divides split over the data ranks as well; a leaf without one stays."""
    free = tuple(name for name in (DATA, EXPERT) if axes.get(name, 1) > 1 and name not in spec)
    ways = math.prod(axes[name] for name in free)
    result: list[str | tuple[str, ...] | None] = list(spec)
    for dim, (axis, size) in enumerate(zip(spec, shape, strict=True)):
        if free and size % (ways * (axes[axis] if axis else 1)) == 0:
            result[dim] = (axis, *free) if axis else free
            break
    return tuple(result)
