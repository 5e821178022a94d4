"""The state of each model, saved under each of several plans and restored under each of the others, bit for bit.

These are the steps of `tests/zoo.py` in plain JAX, and the models that autopar brings, whose states hold keys, counts and running
statistics as well. That of `gpt_scan` has its layers in one stack, which stages divide.
"""

import functools
import warnings

import jax
import pytest

import autopar
from autopar.models import MODELS as BROUGHT
from autopar.models import build
from autopar.split_array import SplitArray
from tests.checkpoints.steps import bits
from tests.models.conftest import SIZES
from tests.zoo import ZOO

ONE_MESH = {
    "searched": {"mesh_shape": (4,)},
    "two_axes": {"mesh_shape": (2, 2)},
    "data_parallel": {"mesh_shape": (4,), "constraints": autopar.data_parallel()},
    "all_devices": {"mesh_shape": (2, 4)},
    "one_device": {"mesh_shape": (1,), "devices": jax.devices()[:1]},
    "zero3": {"mesh_shape": (8,), "constraints": autopar.zero3()},
}
STAGES = {
    f"{count}_stages": {
        "num_stages": count,
        "mesh_shape": (2,),
        "num_microbatches": 2,
        "schedule": "1f1b",
        "batch_statistics": "microbatch",
    }
    for count in (2, 3, 4)
}


DIVIDED = "autopar.models: gpt_scan"


def brought(name):
    """The step, the first state and a batch of one of autopar's models; of a stack, each of four stages has a layer."""
    model = build(name, **SIZES[name] | ({"layers": 4} if name == "gpt_scan" else {}))
    return model.train_step, model.create_state(jax.random.key(0)), next(model.data(0))


MODELS = {**ZOO, **{f"autopar.models: {name}": functools.partial(brought, name) for name in BROUGHT}}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_state_of_the_zoo_goes_from_every_plan_to_every_other(name, tmp_path):
    fun, state, batch = MODELS[name]()
    steps = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)  # of what a model is not made for
        for way, options in (ONE_MESH | STAGES).items():
            steps[way] = autopar.parallelize(fun, planning_seconds=None, **options)
            steps[way].plan(state, batch)
    expected = bits(state)
    for source, step in steps.items():
        held = step.init_state(lambda given: given, state)
        assert any(isinstance(leaf, SplitArray) for leaf in jax.tree.leaves(held)) == (
            name == DIVIDED and source in STAGES
        )
        autopar.save(tmp_path / source, held, step).wait()
        for target in steps:
            assert bits(autopar.restore(tmp_path / source, steps[target])) == expected, (source, target)
    assert len(jax.tree.leaves(state)) > 4
