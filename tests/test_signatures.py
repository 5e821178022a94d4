"""Steps in all signatures train as under their library's own jit: on one mesh, by presets, in microbatches and in stages."""

import numpy as np
import pytest

import autopar
from tests.signatures import SIGNATURES, reference, train

WAYS = {
    "default": {"devices": 2},
    "data parallel": {"mesh_shape": (2,), "constraints": autopar.data_parallel()},
    "zero3": {"mesh_shape": (2,), "constraints": autopar.zero3()},
    "microbatches": {"mesh_shape": (2,), "num_microbatches": 2},
    "stages": {"num_stages": 2, "num_microbatches": 2, "mesh_shape": (1,)},
}
ALL = [(name, way) for name in SIGNATURES for way in WAYS]
FAST = {pair for number, pair in enumerate(ALL) if number % len(WAYS) == number // len(WAYS) % len(WAYS)}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(*p, marks=() if p in FAST else pytest.mark.slow, id=" | ".join(p)) for p in ALL]
)
@pytest.mark.filterwarnings("ignore:86% of the forward work")
def test_it_trains_as_without_autopar(name, way):
    step = autopar.parallelize(SIGNATURES[name].step, **WAYS[way])
    losses, state = train(SIGNATURES[name], step)
    expected, expected_state = reference(name)
    assert expected[0] != expected[2]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for leaf, other in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)
    if way == "zero3":
        matrices = [value for value in step.last_plan().inputs if value.role == "state" and len(value.shape) == 2]
        assert len(matrices) == 6, "two parameters with two moments each"
        assert all(value.partition_spec for value in matrices)
