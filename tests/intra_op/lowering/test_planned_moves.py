"""Priced is what runs: the moves that the census lists are the collectives that the lowering emits, in loops in loops too.

Nothing is compiled: the collectives are counted in the jaxpr of the lowered program, as often as the loops around them run.
"""

import dataclasses
import itertools
import math
from collections import Counter

import jax
import pytest
from jax.extend.core import jaxprs_in_params

from autopar.compat import open_jaxpr
from autopar.intra_op.lowering.per_device import map_over_mesh
from autopar.intra_op.lowering.planned_moves import planned_moves
from autopar.layouts.moves import LOCAL_KINDS
from autopar.program.from_jaxpr import WHILE_TRIPS, program_of
from autopar.program.loops import LoopEquation
from autopar.testing import random_assignment
from tests.intra_op.lowering.nested_programs import nested_program
from tests.layouts.values import device_mesh

MESHES = ((4,), (2, 2), (2, 2, 2))
SEEDS = range(24)
KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def emitted(jaxpr, trips=1):
    """Collectives of a jaxpr by kind, axes and elements of the operand on one device, with how often per step each runs."""
    found = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in KINDS:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            found[KINDS[name], () if name == "ppermute" else axes, eqn.invars[0].aval.size] += trips
        inside = trips * {"scan": eqn.params.get("length", 1), "while": WHILE_TRIPS}.get(name, 1)
        for inner in jaxprs_in_params(eqn.params):
            found += emitted(open_jaxpr(inner), inside)
    return found


def planned(assignment):
    """The same of what the census lists."""
    found, mesh = Counter(), assignment.mesh
    for one in planned_moves(assignment):
        if one.move.kind not in LOCAL_KINDS:
            axes = () if one.move.kind == "collective-permute" else mesh.names(one.move.axes)
            found[one.move.kind, axes, math.prod(one.move.source.local_shape(one.aval.shape, mesh))] += int(one.trips)
    return found


def assert_planned_is_emitted(assignment):
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in assignment.program.invars]
    lowered = jax.make_jaxpr(map_over_mesh(assignment, device_mesh(assignment.mesh.shape)))(*avals)
    assert planned(assignment) == emitted(lowered.jaxpr)


def assignments_of(seed, mesh_shape, *, depth):
    """Random strategies for a random program; copies of gathered values are kept, or dropped soon."""
    fun, args = nested_program(seed, depth=depth)
    assignment, _, _ = random_assignment(fun, *args, mesh_shape=mesh_shape, seed=seed)
    return [assignment, *(dataclasses.replace(assignment, copy_span=span) for span in (0, 2, 5))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [seed if seed < 12 else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS])
def test_the_moves_listed_are_the_collectives_emitted_in_loops_in_loops(seed):
    kept, *dropped = assignments_of(seed, MESHES[seed % len(MESHES)], depth=2)
    for assignment in (kept, dropped[seed // len(MESHES) % len(dropped)]):
        assert_planned_is_emitted(assignment)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_so_they_are_for_deeper_programs_on_every_mesh(seed, mesh_shape):
    for assignment in assignments_of(seed, mesh_shape, depth=3):
        assert_planned_is_emitted(assignment)


def test_among_the_random_programs_every_kind_of_loop_is_in_every_other():
    found = set()
    for seed in SEEDS:
        fun, args = nested_program(seed, depth=2)
        program, _ = program_of(jax.make_jaxpr(fun)(*args))
        loops = [eqn for eqn in program.walk() if isinstance(eqn, LoopEquation)]
        found |= {
            (outer.loop.kind, inner.loop.kind)
            for outer in loops
            for nested in outer.nested
            for inner in nested.program.equations
            if isinstance(inner, LoopEquation)
        }
    assert found == set(itertools.product(("scan", "while", "cond"), repeat=2))
