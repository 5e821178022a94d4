"""What planning takes over instead of finding it again: packed assignments, and prices of strategies that divide alike."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.cost_model.hardware import preset
from autopar.intra_op.choices.catalogue import Catalogues
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.planner import plan_step
from autopar.intra_op.restore import pack, restore, unpack
from autopar.layouts.mesh import LogicalMesh
from autopar.rules.table import entry_for
from tests.inter_op.test_search import arguments, request_on, traced_step, two_nodes


def step_with_loops(weights, x):
    """One training step through a scan with a branch."""

    def loss(weights):
        def layer(h, w):
            h = lax.cond(h.sum() > 0, lambda: jnp.tanh(h @ w), lambda: h)
            return h, h.sum(axis=0)

        h, sums = lax.scan(layer, x, jnp.stack(weights))
        return (h**2).mean() + sums.mean()

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_an_assignment_that_was_packed_is_the_one_that_it_was_and_the_one_of_its_plan(mesh_shape):
    traced = traced_step(*arguments(16, layers=2, batch=64), fun=step_with_loops)
    request = dataclasses.replace(request_on(two_nodes(2)), meshes=(LogicalMesh.of(mesh_shape),))
    planned = plan_step(traced, request)
    unpacked = unpack(pickle.loads(pickle.dumps(pack(planned))), traced, request)
    assert unpacked.plan == planned.plan
    for found in (unpacked, restore(traced, planned.plan, request)):
        for field in dataclasses.fields(planned.assignment):
            if field.name != "spaces":
                assert getattr(found.assignment, field.name) == getattr(planned.assignment, field.name), field.name
        for space in (found.assignment.spaces, planned.assignment.spaces):
            assert space.network.mesh == planned.assignment.mesh


@pytest.mark.parametrize("machine", ["p3.16xlarge", "cpu"])
def test_strategies_that_divide_all_operands_alike_are_priced_as_each_by_itself(machine):
    traced = traced_step(*arguments(48, layers=2, batch=64), fun=step_with_loops)
    catalogue = Catalogues().of(LogicalMesh.of((2, 2)), preset(machine), PlannerOptions())
    traffic = catalogue.rules.traffic(traced.program)
    for eqn in traced.program.walk():
        if eqn.regions:
            continue
        rule, entry, flops = catalogue.rules.rule(eqn), entry_for(eqn), catalogue.rules.flops(eqn)
        for part in (None, traffic.get(eqn)):
            found = catalogue.choices(eqn, rule, frozenset({"sum"}), traffic=part)
            alone = [catalogue._seconds(eqn, entry, flops, s, traffic=part) for s in found.strategies]
            assert np.array_equal(found.seconds, alone)
            assert np.array_equal(found.out_bytes, [catalogue._out_bytes(eqn, s) for s in found.strategies])
