"""The inter-operator dynamic program: layers to stages, stages to submeshes.

In: a `StageProblem`: what layers i..j-1 cost on each submesh that may be used, the cluster, the microbatches, the schedule.
Out: a `StageChoice`: the stages in order, their submeshes, the predicted seconds of a step. Letters: B microbatches, S stages,
t seconds of a stage per microbatch (forward and backward), c of the transfer to the next stage and back, u from one microbatch
to the next, o its seconds once per step (reduction of gradients, update; all stages do theirs at the same time, so the slowest
counts), n its devices, D all. Then

    T = a sum t + sum c + b(S) max u + max o

              backward is one task     a = 1    b = B - 1       1f1b, gpipe and their like, and inference
              interleaved, v chunks    a = 1/v  b = v B - 1     a "stage" is a chunk, S = p v, all meshes equal, p divides B
              zb-h1                    a = 1/3  b = B - 1/3 + max(0, S - B)/3     the three kinds of task equally long
              one stage                a = 1    b = B - 1       no pipeline: a loop in one executable

which for equal stages gives the bubbles (p - 1)/B, (p - 1)/(v B) and, for zb-h1, a third of the first. u is t, unless a stage
waits for its microbatches to come back. The r-th stage from the end has f in flight, each of which takes as long as it takes
through r stages like this one and back (Little's law; `tests/inter_op/dynamic_program/test_periods.py` simulates schedules):

    u(r) = max(t, (r t + (r - 1) c) / f)               if f < B, and backward is one task
    u(r) = max(t, ((2 r + 1) t / 3 + (r - 1) c) / r)   zb-h1, of whose weight gradients one is between two microbatches

Interleaved schedules and inference are taken to wait for no transfer but the first. A stage fits if weights + f activations +
work <= memory, f the microbatches in flight of its place in the schedule, work what its tasks need. Of v chunks on a mesh
v weights + f activations + work <= memory, f of all chunks, which is exact where they are alike. Under limits max u <= x,
max o <= y

    F(r, k, d; x, y) = min over j > k and submeshes z, u(k, j, z) <= x, o(k, j, z) <= y, which fit as the r-th stage from the end,
                       of a t(k, j, z) + c(k, j, z) + F(r - 1, j, d - n(z); x, y)     F(0, L, 0) = 0
    T = min over y of (y + min over x of min over S of F(S, 0, D; x, y) + b(S) x)

x: bisection over the distinct u, from the least that any choice reaches to the largest that can still pay. An interval is dropped
if for each S a F at its upper end plus b(S) times its lower end is worse than the best known. A bound on F that ignores r (a
stage fits if it fits at any place) is quick; F itself is computed only if that bound allows, first for the x that promises most
by it. With the same bound G(k, d) on the layers before k, a choice in which layers from k on have d devices takes at least F + G
+ b x: F is computed for those d alone for which that matters, and known as at least what matters for others. Stages that are too
slow for any such choice are left out at once (`family_search.py`). y: from infinity down; a choice that attains the minimum under
y beats all others that do not have a smaller max o. What F is at least under limits holds under smaller ones. `tolerance` also
drops intervals that could gain less; `bound_s` is then the time that no choice beats. Ties: fewer stages, then earlier cuts, then
earlier submeshes in the list.

What can go wrong: costs may not add up over layers, so the caller plans the chosen stages as wholes. A stage among unlike ones
waits longer or shorter than among its like; the caller times the schedule.
"""

from __future__ import annotations

import math

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.dynamic_program.best_choice import BestChoice
from autopar.inter_op.dynamic_program.describe_choice import (
    describe_stages,
    explain_nothing_left,
    explain_out_of_memory,
)
from autopar.inter_op.dynamic_program.families import families_of
from autopar.inter_op.dynamic_program.family_search import FamilySearch
from autopar.inter_op.dynamic_program.problem import Manual, SlowerStages, StageChoice, StageProblem
from autopar.inter_op.dynamic_program.recursion import TIE
from autopar.inter_op.dynamic_program.submeshes import Submesh, kind_of, place, place_in_parts, submeshes, tiles
from autopar.schedules.schedules import SCHEDULES, interleaves
from autopar.solver.budget import Budget


def choose_stages(
    problem: StageProblem, *, manual: Manual | None = None, tolerance: float = 0.0, explain: bool = True
) -> StageChoice:
    """The fastest choice that fits, to within the relative `tolerance`.

    Raises OutOfMemoryError if nothing fits, and ArgumentError if nothing is left to choose. With `explain` the former names the
    tightest stage of the choice that comes closest, which takes a search of its own.
    """
    manual = manual or Manual()
    best = _search(problem, manual, BestChoice(tolerance))
    if best.stages is not None:
        return _describe(problem, best)
    possible = [family for family in families_of(problem, manual) if family.is_possible]
    if possible and not explain:
        raise _does_not_fit(problem)
    if possible:
        raise OutOfMemoryError(explain_out_of_memory(problem, possible))
    raise ArgumentError(explain_nothing_left(problem, manual))


def choose_faster_stages(
    problem: StageProblem,
    below_s: float,
    *,
    manual: Manual | None = None,
    tolerance: float = 0.0,
    budget: Budget | None = None,
) -> StageChoice | SlowerStages:
    """The fastest choice as in `choose_stages`, if it takes less than `below_s`; the best that is known when the budget is over.

    Raises OutOfMemoryError and ArgumentError as `choose_stages`, where no choice fits at any speed.
    """
    manual = manual or Manual()
    best = _search(problem, manual, BestChoice(tolerance, below_s=below_s, budget=budget))
    if best.stages is not None and (best.step_s <= below_s or best.is_cut_short):
        return _describe(problem, best)
    if math.isfinite(below_s) and math.isfinite(best.floor_s):
        return SlowerStages(max(below_s, best.floor_s))
    if any(family.is_possible for family in families_of(problem, manual)):
        raise _does_not_fit(problem)
    raise ArgumentError(explain_nothing_left(problem, manual))


def _search(problem: StageProblem, manual: Manual, best: BestChoice) -> BestChoice:
    _check(problem, manual)
    for family in families_of(problem, manual):
        quick = family.within(best.worth_s)
        if quick.least_step_s <= best.worth_s * (1 + TIE) and math.isfinite(quick.least_step_s):
            FamilySearch(quick, best).run()
        elif math.isfinite(family.least_step_s):
            best.floor_s = min(best.floor_s, max(best.worth_s, family.least_step_s))
    return best


def _does_not_fit(problem: StageProblem) -> OutOfMemoryError:
    return OutOfMemoryError(f"No choice of stages fits into {problem.memory_bytes:,.0f} bytes per device.")


def may_fit(problem: StageProblem, manual: Manual) -> bool:
    """False if no choice of stages fits the memory; True says little, but is found quickly."""
    return any(math.isfinite(family.least_step_s) for family in families_of(problem, manual))


def _check(problem: StageProblem, manual: Manual) -> None:
    wrong = []
    if problem.schedule not in SCHEDULES:
        wrong.append(f"schedule {problem.schedule!r} is unknown; there are {', '.join(map(repr, SCHEDULES))}")
    if interleaves(problem.schedule) != (problem.virtual_stages > 1) or problem.virtual_stages < 1:
        wrong.append(
            f"schedule {problem.schedule!r} with virtual_stages={problem.virtual_stages}: 'interleaved' needs two or more, "
            "the others one"
        )
    if problem.microbatches < 1:
        wrong.append(f"num_microbatches={problem.microbatches}: must be at least 1")
    known = _known_submeshes(problem)
    foreign = sorted(set(problem.options) - set(known))
    if foreign and manual.submeshes is None:
        wrong.append(f"submeshes {foreign} are not among {known}, so they may not fill the cluster")
    if manual.submeshes is not None and not tiles(manual.submeshes, problem.cluster[0], problem.cluster[1]):
        wrong.append(f"submeshes {manual.submeshes} do not fill {problem.cluster} (nodes, devices per node)")
    if manual.cuts is not None and list(manual.cuts) != sorted({c for c in manual.cuts if 0 < c < problem.layers}):
        wrong.append(f"cuts {manual.cuts} are not ascending numbers of layers between 1 and {problem.layers - 1}")
    if wrong:
        raise ArgumentError("Stages cannot be chosen like this:\n" + "\n".join(f"  - {line}" for line in wrong))


def _known_submeshes(problem: StageProblem) -> tuple[Submesh, ...]:
    """Those that fill the cluster wherever their sizes add up."""
    if not problem.parts:
        return submeshes(problem.cluster[0], problem.cluster[1])
    return tuple((*one, kind_of(part)) for part in problem.parts for one in submeshes(part[0], part[1]))


def _describe(problem: StageProblem, best: BestChoice) -> StageChoice:
    assert best.stages is not None
    assert best.family is not None
    stages = describe_stages(best.stages, best.family)
    meshes = len(stages) // best.family.chunks
    slowest = max(range(len(stages)), key=lambda s: stages[s].stage_s)
    taken, (nodes, per_node, *_) = [s.submesh for s in stages[:meshes]], problem.cluster
    devices = place_in_parts(taken, problem.parts) if problem.parts else place(taken, nodes, per_node)
    assert devices is not None
    bound_s = 0.0 if best.is_cut_short else min(best.step_s * (1 - best.tolerance), best.below_s)
    return StageChoice(
        stages=stages,
        step_s=best.step_s,
        bound_s=bound_s,
        bottleneck=slowest,
        devices=devices,
    )
