"""From a traced step to a `Plan`: compare logical meshes, choose strategies, predict.

In: a `TracedStep`, the number of devices, a cluster, options. Out: a `PlannedStep`: the `Plan`, and the `Assignment` that the
lowering runs. What can go wrong: nothing fits the memory, or no plan meets the constraints.
"""

from __future__ import annotations

import dataclasses
import math
import time

from autopar.avals import bytes_of
from autopar.errors import warn
from autopar.intra_op.choices.allowed_values import fitting_meshes
from autopar.intra_op.compare_meshes import MeshComparison
from autopar.intra_op.request import PlannedStep, PlanRequest
from autopar.intra_op.shared_search import Beaten, SharedSearch
from autopar.intra_op.step_memory import evenly_divided_parts
from autopar.program.program import Program
from autopar.program.step import TracedStep


def plan_step(traced: TracedStep, request: PlanRequest) -> PlannedStep:
    """The best plan over the request's meshes. Raises ConstraintError, OutOfMemoryError."""
    planned = plan_way(traced, request, SharedSearch(is_bounded=False))
    assert isinstance(planned, PlannedStep), "there is no other way that could beat it"
    return planned


def plan_way(traced: TracedStep, request: PlanRequest, shared: SharedSearch) -> PlannedStep | Beaten:
    """The best plan of one way to run a step. Raises ConstraintError, OutOfMemoryError.

    `shared`: what is known from other ways to run the same step, and is added to. No mesh is planned whose bound is above the
    best of these.
    """
    started = time.perf_counter()
    _warn_of_undividable_batch(traced, request)
    request = dataclasses.replace(request, meshes=fitting_meshes(traced, request.meshes))
    planned = MeshComparison(traced, request, shared).run()
    if isinstance(planned, Beaten):
        return planned
    plan = dataclasses.replace(planned.plan, planning_s=time.perf_counter() - started)
    return dataclasses.replace(planned, plan=plan)


def far_excess(traced: TracedStep, request: PlanRequest) -> float:
    """How many times a step's temporaries exceed the memory that is left for them, where that is too far to plan it.

    Where all weights would fit, once, into a part of that memory (`Tuning.weights`), they are taken to be there as wholes: fast
    plans gather them once for all microbatches. 0 if the step may fit in some division among the devices, and for a small step,
    which is planned in less time than this takes.
    """
    limit, parts = request.memory_limit_bytes, _divided_evenly(traced, request)
    if limit is None or parts is None:
        return 0.0
    kept, temporaries = parts
    left, needed = limit - kept, request.tuning.undivided * temporaries
    if needed <= request.tuning.far * left:
        return 0.0
    weights = sum(bytes_of(leaf.one) for leaf in traced.inputs if leaf.use == "parameter")
    left -= weights if weights <= request.tuning.weights * left else 0
    return needed / left if left > 0 else math.inf


def least_excess(traced: TracedStep, request: PlanRequest) -> float:
    """How many times a step's temporaries exceed the memory that is left for them in every division; 0 if they may fit.

    As of `far_excess`, it is 0 for a small step.
    """
    limit, parts = request.memory_limit_bytes, _divided_evenly(traced, request)
    if limit is None or parts is None or sum(parts) <= limit:
        return 0.0
    kept, temporaries = parts
    return temporaries / (limit - kept) if kept < limit else math.inf


def _divided_evenly(traced: TracedStep, request: PlanRequest) -> tuple[int, int] | None:
    """See `evenly_divided_parts`; None for a small step, and one whose values all fit at once, which is found out in no time."""
    limit = request.memory_limit_bytes
    is_large = sum(1 for _ in traced.program.walk()) >= request.tuning.large
    if limit is None or not is_large:
        return None
    request = dataclasses.replace(request, meshes=fitting_meshes(traced, request.meshes))
    devices = max(mesh.size for mesh in request.meshes)
    if _bytes_of_all_values(traced.program) <= devices * limit:
        return None
    return evenly_divided_parts(traced, request)


def _bytes_of_all_values(program: Program) -> int:
    """Bytes of a program's inputs and of every result of its equations, as if all were alive at once."""
    return sum(map(bytes_of, program.invars)) + sum(bytes_of(v) for eqn in program.walk() for v in eqn.outvars)


def _warn_of_undividable_batch(traced: TracedStep, request: PlanRequest) -> None:
    """One warning for all batch leaves that no mesh axis divides; constraints on the batch speak for themselves.

    None for microbatches, which may be tried one after the other: the batch they are cut from is not to blame.
    """
    sizes = sorted({size for mesh in request.meshes for size in mesh.shape if size > 1})
    if not sizes or traced.microbatches > 1 or any(rule.role == "batch" for rule in request.constraints.rules):
        return
    leaves = [leaf.one for leaf in traced.inputs if leaf.role == "batch" and leaf.shape and not leaf.shared]
    uneven = [leaf for leaf in leaves if all(leaf.shape[0] % size for size in sizes)]
    if uneven:
        listed = ", ".join(f"{leaf.path} has {leaf.shape[0]} examples (shape {leaf.shape})" for leaf in uneven[:4])
        warn(
            f"{listed}{', ...' if len(uneven) > 4 else ''}, which no mesh axis of size {', '.join(map(str, sizes))} divides: the "
            "batch cannot be split, so the plan has no data parallelism over it. "
            f"Pad or drop examples to a multiple of {sizes[0]}."
        )
