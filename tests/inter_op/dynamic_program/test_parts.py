"""On a mixed cluster the choice of stages is the best of all: each stage on nodes of one kind, the kinds in a given order."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.dynamic_program.choose_stages import choose_stages
from autopar.inter_op.dynamic_program.problem import StageProblem
from autopar.inter_op.dynamic_program.submeshes import kind_of, size_of, submeshes
from tests.inter_op.dynamic_program.brute_force import fits, rank, step_s
from tests.inter_op.dynamic_program.test_choose_stages import chosen_of, table_of

PARTS = [
    ((1, 2, 0), (1, 2, 1)),
    ((1, 2, 1), (1, 4, 0)),
    ((2, 2, 0), (1, 2, 1)),
    ((1, 1, 2), (1, 2, 0), (1, 1, 1)),
    ((2, 3, 0), (1, 1, 1)),
]


def options_of(parts):
    kinds = sorted(parts, key=kind_of)
    return tuple((*one, kind_of(part)) for part in kinds for one in submeshes(part[0], part[1]))


def all_choices(problem):
    """Every way to cut the layers and to give submeshes to the stages that fills one part after the other."""
    for count in range(1, problem.layers + 1):
        for cuts in itertools.combinations(range(1, problem.layers), count - 1):
            spans = list(itertools.pairwise((0, *cuts, problem.layers)))
            for chosen in itertools.product(range(len(problem.options)), repeat=count):
                taken = [problem.options[z] for z in chosen]
                along = [(kind, sum(map(size_of, run))) for kind, run in itertools.groupby(taken, kind_of)]
                if along != [(kind_of(part), size_of(part)) for part in problem.parts]:
                    continue
                stages = [(i, j, z) for (i, j), z in zip(spans, chosen, strict=True)]
                if all(math.isfinite(problem.costs.seconds[z, i, j]) for i, j, z in stages):
                    yield stages


def assert_best(problem):
    found = [(step_s(problem, stages), stages) for stages in all_choices(problem) if fits(problem, stages)]
    if not found:
        with pytest.raises((OutOfMemoryError, ArgumentError)):
            choose_stages(problem)
        return False
    least = min(seconds for seconds, _ in found)
    best = min((stages for seconds, stages in found if seconds <= least * (1 + 1e-12)), key=rank)
    choice = choose_stages(problem)
    assert choice.step_s == pytest.approx(least, rel=1e-12)
    assert chosen_of(choice) == best
    assert sorted(itertools.chain(*choice.devices)) == list(range(problem.devices))
    assert [len(devices) for devices in choice.devices] == [size_of(stage.submesh) for stage in choice.stages]
    return True


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe", "zb-h1", "inference"])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_choice_is_the_best_of_all_in_every_order_of_kinds(parts, schedule):
    rng, solved = np.random.default_rng(5), 0
    options = options_of(parts)
    for number in range(6):
        problem = StageProblem(
            costs=table_of(rng, 4, len(options), whole=number % 2 == 0),
            options=options,
            cluster=(1, 1),
            microbatches=1 + number,
            schedule=schedule,
            memory_bytes=(math.inf, 9.0)[number % 3 == 2],
            parts=parts,
        )
        solved += assert_best(problem)
        turned = dataclasses.replace(problem, parts=parts[::-1])
        solved += assert_best(turned)
    assert solved > 6


def test_interleaved_meshes_are_equal_and_unlike_nodes_have_none():
    options = options_of(PARTS[0])
    costs = table_of(np.random.default_rng(0), 4, len(options))
    problem = StageProblem(
        costs=costs,
        options=options,
        cluster=(1, 1),
        microbatches=4,
        schedule="interleaved",
        virtual_stages=2,
        parts=PARTS[0],
    )
    with pytest.raises(ArgumentError, match="1 nodes x 2 devices and 1 nodes x 2 devices"):
        choose_stages(problem)
