"""Layers planned by several processes at once, and ahead of what is asked, are those that one process plans when asked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.cost_model.hardware import preset
from autopar.errors import ConstraintError
from autopar.inter_op import planned_layers
from autopar.inter_op.layer_costs import LayerCosts
from autopar.inter_op.plan_stages import measured_stage
from autopar.inter_op.planned_layers import PlannedLayers
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.planner import PlanRequest
from autopar.layouts.constraints import Constraints
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from autopar.stages.time_loops import time_loop
from tests.inter_op.test_search import step

LAYERS = 6


def layers_of(processes):
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    signature = CallSignature(step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, (weights, x), {}))
    request = PlanRequest((), preset("cpu"), None, Constraints(), PlannerOptions(), processes=processes)
    loop = time_loop(traced, 4)
    places = LayerCosts(lambda _: loop, 4, request, [(1, 1)]).of(4).places
    return PlannedLayers(loop, places, request)


@pytest.fixture
def asked(monkeypatch):
    """The numbers of devices that this process plans on; on four it is refused."""
    sizes = []

    def counted(program, request):
        size = request.meshes[0].size
        sizes.append(size)
        if size == 4:
            raise ConstraintError("not on four")
        return measured_stage(program, request)

    monkeypatch.setattr(planned_layers, "measured_stage", counted)
    return sizes


def test_what_was_planned_ahead_is_what_is_planned_when_asked(asked):
    one, two = layers_of(1), layers_of(2)
    one.plan({1}, perhaps=2)
    assert 2 not in asked, "one process has no time to spare"
    two.plan({1}, perhaps=2)
    asked.clear()
    assert two.figures(two._common, 2) is not None
    assert asked == [], "known already"
    for layers in (one, two):
        layers.plan({1, 2})
    figures = [[[layers.figures(n, size) for n in range(len(layers))] for size in (1, 2)] for layers in (one, two)]
    assert figures[0] == figures[1]


def test_an_error_of_what_nobody_asked_for_is_raised_when_somebody_does(asked):
    layers = layers_of(2)
    layers.plan({1}, perhaps=4)
    with pytest.raises(ConstraintError, match="not on four"):
        layers.plan({1, 4})
