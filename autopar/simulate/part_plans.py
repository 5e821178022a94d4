"""One part of a training job, planned: what its plan says of seconds, collectives and memory.

In: a cluster, a part and its step (`model_parts`). Out: a `PlannedPart`. The ordinary planner plans the step under the row's
plan, stated as constraints on leaves and, inside the part, as what is not allowed: tensor ranks use the part of a parameter that
they have, and without sequence parallelism no half of an all-reduce leaves tokens split. A step is one microbatch; what its plan
cannot say is told apart afterwards: sums over data ranks happen once a step, and gathered copies are not kept from forward to
backward. What can go wrong: a plan that the planner can state and the row's framework does not have.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from autopar.compat import Var
from autopar.cost_model.machine import Cluster, Overlap
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.lowering.assignment import Assignment
from autopar.intra_op.lowering.planned_moves import PlannedMove, planned_moves
from autopar.intra_op.planner import plan_step
from autopar.intra_op.request import PlanRequest
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import KINDS, LOCAL_KINDS
from autopar.plan import WITHIN, CollectivePlan
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.program import Equation, fan_out_p
from autopar.program.step import TracedStep
from autopar.program.trace import trace
from autopar.rules.table import entry_for
from autopar.simulate.closed_forms.job_prediction import Part
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import Exchange, ExchangeKind, Group
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.kept_values import FORWARD, KeptValue, kept_values, stages_of_step
from autopar.simulate.model_parts import PartProgram, PartStep
from autopar.simulate.part_constraints import DATA, EXPERT, TENSOR

_KINDS: dict[str, ExchangeKind] = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-to-all": "all-to-all",
    "collective-permute": "permute",
}


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of contractions and of all else, each in a loop of its own."""

    contraction_s: float = 0.0
    other_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """What a plan says of one microbatch on one device.

    Attributes:
        work: all operations; without those on attention's scores if a kernel fuses them.
        scores: of them the forward ones on attention's scores, which selective recomputation repeats.
        exchanges: collectives of a microbatch, with how often each happens.
        gradient_bytes: what is reduced over data ranks, once a step.
        kept_bytes, scores_bytes: activations from forward to backward, attention's scores apart.
        again_bytes: what recomputation of the whole part brings back for backward.
        operations: equations of the part's program.
    """

    work: Seconds
    scores: Seconds
    exchanges: tuple[tuple[Exchange, int], ...]
    gradient_bytes: float
    kept_bytes: float
    scores_bytes: float
    again_bytes: float
    operations: int


def trace_part(program: PartProgram) -> TracedStep:
    """The program of a part, traced: the same on every mesh."""
    signature = CallSignature(program.run, (), (), "auto")
    return trace(signature, bind_arguments(signature, (program.state,), {}))


def plan_part(
    cluster: Cluster, part: Part, step: PartStep, *, zero_stage: int, traced: TracedStep | None = None
) -> PlannedPart:
    """The plan of a part, whose program may have been traced. Raises ConstraintError if the row's plan cannot be stated on it.

    In the plan nothing hides behind compute: the closed form says what does in the whole step.
    """
    cluster, traced = dataclasses.replace(cluster, overlap=Overlap()), traced or trace_part(step.program)
    options = _options(part, zero_stage, [leaf.path for leaf in traced.inputs])
    request = PlanRequest(
        meshes=(LogicalMesh.of(step.axes),),
        cluster=cluster,
        memory_limit_bytes=None,
        constraints=step.constraints,
        options=options,
    )
    planned = plan_step(traced, request)
    plan, assignment = planned.plan, planned.assignment
    given, parameters = _inputs(traced, "state/given/"), _inputs(traced, "state/params/", "state/grads/")
    stage_of, kept = stages_of_step(traced.program, given), kept_values(assignment, given, parameters)
    again = gathered_again(assignment, plan.collectives, given)
    exchanges, gradients = exchanges_of((*plan.collectives, *again), jax.tree.leaves(step.state["grads"]))
    alone = has_kernel(part)
    return PlannedPart(
        work=_sum_seconds(assignment, lambda eqn: not (alone and _touches_scores(eqn, part))),
        scores=_sum_seconds(assignment, lambda eqn: stage_of[eqn] == FORWARD and _touches_scores(eqn, part)),
        exchanges=exchanges,
        gradient_bytes=gradients,
        kept_bytes=_bytes(kept.kept, part, scores=False),
        scores_bytes=0.0 if alone else _bytes(kept.kept, part, scores=True),
        again_bytes=_bytes(kept.again, part, scores=False) + (0.0 if alone else _bytes(kept.again, part, scores=True)),
        operations=len(traced.program.equations),
    )


def has_kernel(part: Part) -> bool:
    """Whether the part has attention, in a kernel that keeps scores on the chip."""
    return isinstance(part.split, LayerSplit) and part.split.fused_attention and part.kind not in ("embedding", "head")


def _inputs(traced: TracedStep, *places: str) -> frozenset[Var]:
    leaves = zip(traced.program.invars, traced.inputs, strict=False)
    return frozenset(var for var, leaf in leaves if leaf.path.startswith(places))


def _sum_seconds(assignment: Assignment, counts: Callable[[Equation], bool]) -> Seconds:
    """Seconds of the equations that count."""
    sums = {True: 0.0, False: 0.0}
    for eqn, seconds, trips in assignment.seconds:
        if counts(eqn):
            sums[entry_for(eqn).heavy] += seconds * trips
    return Seconds(sums[True], sums[False])


def _bytes(values: Sequence[KeptValue], part: Part, *, scores: bool) -> float:
    return float(sum(value.bytes for value in values if _are_scores(value.shape, part) == scores))


def _touches_scores(eqn: Equation, part: Part) -> bool:
    """Whether an operation reads or writes attention's scores."""
    return any(_are_scores(value.aval.shape, part) for value in (*eqn.invars, *eqn.outvars))


def _are_scores(shape: Sequence[int], part: Part) -> bool:
    """Whether it is the shape of scores, (B, N, S, S): B samples, N heads, S positions.

    A heuristic: the traced program knows no attention, only contractions. Any other value of four dimensions that end in
    (N, S, S) counts as scores too, and scores of another shape do not: those of grouped heads, (B, K, N/K, S, S), or of a
    window of positions. The models that are replayed make no such values.
    """
    if not isinstance(part.shape, TransformerShape) or len(shape) != 4:
        return False
    return tuple(shape[1:]) == (part.shape.heads, part.shape.seq_len, part.shape.seq_len)


def _options(part: Part, zero_stage: int, paths: Sequence[str]) -> PlannerOptions:
    """What Megatron's plan does not do inside a part; see the module. ZeRO 3 gathers parameters."""
    if zero_stage >= 3:
        return PlannerOptions()
    held = frozenset(i for i, path in enumerate(paths) if path.startswith("state/params/"))
    forbidden: set[str] = set()
    text = isinstance(part.shape, TransformerShape)
    if part.split.tensor_ranks > 1 and not (text and part.split.sequence_parallel):
        # Tokens change places between the ranks of a mixture, channels of images between operations: both come back by a gather.
        whole = text and part.kind != "expert"
        forbidden = {"reduce-scatter", "all-gather"} if whole else {"reduce-scatter"}
    return PlannerOptions(kinds=frozenset(KINDS) - forbidden, held=held)


def gathered_again(
    assignment: Assignment, collectives: Sequence[CollectivePlan], given: Collection[Var]
) -> list[CollectivePlan]:
    """The gathers over tensor ranks whose copies forward and backward both read: backward makes them again.

    Between the two only the parts are kept, as the published account of sequence parallelism has it; a plan of one program that
    has memory enough keeps the copies. Backward is what depends on the gradients `given`.
    """
    behind, roots, sides = set(given), dict[Var, Var](), dict[tuple[Var, Layout], set[bool]]()
    for eqn in assignment.program.equations:
        operands = _operands(assignment, eqn)
        behind |= set(eqn.outvars) if any(var in behind for var, _ in operands) else set()
        if eqn.primitive is fan_out_p:
            roots[eqn.outvars[0]] = roots.get(operands[0][0], operands[0][0])
            continue
        for var, layout in operands:
            sides.setdefault((roots.get(var, var), layout), set()).add(eqn.outvars[0] in behind)

    def on_both(one: PlannedMove) -> bool:
        taken = [] if one.equation is None else _operands(assignment, one.equation)
        copies = [(roots.get(var, var), layout) for var, layout in taken if layout == one.move.target]
        return any(len(sides.get(copy, ())) == 2 for copy in copies)

    moves = [one for one in planned_moves(assignment) if one.move.kind not in LOCAL_KINDS]
    between = [item for item in collectives if item.overlap != WITHIN]  # those within operations move no value
    pairs = zip(between, moves, strict=True)
    return [item for item, one in pairs if item.kind == "all-gather" and item.axes == (TENSOR,) and on_both(one)]


def _operands(assignment: Assignment, eqn: Equation) -> list[tuple[Var, Layout]]:
    strategy = assignment.strategies[eqn]
    return [(v, layout) for v, layout in zip(eqn.invars, strategy.inputs, strict=True) if isinstance(v, Var)]


def exchanges_of(
    collectives: Sequence[CollectivePlan], gradients: Sequence[Any]
) -> tuple[tuple[tuple[Exchange, int], ...], float]:
    """Collectives of a microbatch as the plan prices them, and the bytes of gradients that are reduced over data ranks.

    Sums over data ranks are gradients. What else moves and has a parameter's shape is the other half of such a sum, a shard of
    gradients that changes places, or ZeRO 3's gather: the closed form says when these happen. Sums of biases and norms over
    tensor ranks that have tokens of their own are gradients as well; they come once a step, and no framework counts them.

    A heuristic: a plan names the type of a collective's operand and not the leaf behind it. An activation that has the shape
    of a parameter, say hidden by hidden, counts as one; anything that is summed over data ranks counts as a gradient; and what
    is no larger than the largest bias or norm counts as one of these.
    """
    shapes = {",".join(map(str, leaf.shape)) for leaf in gradients}
    widest = max((leaf.size * leaf.dtype.itemsize for leaf in gradients if len(leaf.shape) == 1), default=0)
    found: Counter[Exchange] = Counter()
    reduced = 0.0
    for item in collectives:
        over_data = bool({DATA, EXPERT} & set(item.axes)) and item.kind != "all-to-all"
        of_parameter = item.operand.partition("[")[2].rstrip("]") in shapes
        if over_data and item.kind in ("all-reduce", "reduce-scatter"):
            reduced += item.bytes * item.count
        elif item.bytes > widest and not of_parameter:
            group: Group = "expert" if EXPERT in item.axes else "data" if DATA in item.axes else "tensor"
            exchange = Exchange(
                kind=_KINDS[item.kind], group=group, full_bytes=float(item.bytes), seconds=float(item.predicted_s)
            )
            found[exchange] += round(item.count)
    return tuple(sorted(found.items(), key=lambda pair: (pair[0].kind, pair[0].full_bytes))), reduced
