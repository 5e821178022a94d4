"""Why a leaf of a transformer, or of a convolutional net, has its layout: every price that is named is that of forcing it."""

import dataclasses
import functools

import jax
import pytest

import autopar
from autopar.why import leaf as leaves
from tests.why.test_leaf import MODES, SETTINGS
from tests.zoo import ZOO

PATHS = {
    "one mesh": {
        "gpt": ("state/params/blocks/0/up/kernel", "state/params/blocks/1/attention/out", "batch/tokens"),
        "resnet_block": ("state/params/kernels/mid", "state/stats/out/mean", "batch/images"),
        "unet": ("state/params/kernels/up", "state/params/biases/mid"),
    },
    "stages": {
        "gpt": ("state/params/blocks/1/down/kernel", "state/params/tokens"),
        "unet": ("state/params/kernels/bottom",),
    },
}
CASES = [(mode, model, path) for mode, models in PATHS.items() for model, paths in models.items() for path in paths]


@functools.cache
def planned(mode: str, model: str, path: str = "", spec: jax.sharding.PartitionSpec | None = None):
    """The plan of a model of the zoo; a layout is forced where one is given."""
    step, *arguments = ZOO[model]()
    constraints = {path: spec} if path else None
    return autopar.parallelize(step, **SETTINGS, **MODES[mode], constraints=constraints).plan(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "model", "path"), CASES)
def test_each_layout_that_is_named_costs_what_forcing_it_costs(mode, model, path, monkeypatch):
    monkeypatch.setattr(leaves, "MOST_TRIED", 6)
    plan = planned(mode, model)
    answer = plan.why(path).answer
    assert answer.step_s == plan.step_s
    assert answer.others
    for other in answer.others:
        spec = dataclasses.replace(answer.leaf, spec=other.spec).partition_spec
        if other.step_s is None:
            with pytest.raises((autopar.ConstraintError, autopar.OutOfMemoryError)):
                planned(mode, model, path, spec)
            continue
        forced = planned(mode, model, path, spec)
        assert forced.input(path).spec == other.spec
        assert forced.step_s - plan.step_s == pytest.approx(other.step_s - answer.step_s, rel=1e-9, abs=1e-15)
        assert forced.peak_bytes == other.peak_bytes
        assert other.step_s >= plan.lower_bound_s * (1 - 1e-9)
