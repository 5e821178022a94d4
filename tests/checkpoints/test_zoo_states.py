"""The state of each model of the zoo, saved under each of several plans and restored under each of the others, bit for bit."""

import warnings

import jax
import pytest

import autopar
from autopar.models import build
from autopar.split_array import SplitArray
from tests.checkpoints.steps import bits
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


def scanned():
    """A GPT whose layers are one stack under a scan, which stages divide."""
    model = build("gpt_scan", layers=4, hidden=32, heads=4, seq=8, batch=16)
    return model.train_step, model.create_state(jax.random.key(0)), next(model.data(0))


MODELS = {**ZOO, "gpt_scan": scanned}


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
            name == "gpt_scan" and source in STAGES
        )
        autopar.save(tmp_path / source, held, step).wait()
        for target in steps:
            assert bits(autopar.restore(tmp_path / source, steps[target])) == expected, (source, target)
    assert len(jax.tree.leaves(state)) > 4
