"""The parts of a training job as the ordinary planner plans them on a simulated cluster.

In: a cluster, a job (`TrainingJob`). Out: a `Timing` for `predict_with`: for each part of a stage the work whose seconds are
those of a plan, that is of the operations that the planner priced and the collectives that it chose under the constraints which
state the row's plan. Equal parts of different rows are planned once. What a plan of one microbatch does not say is left to the
closed form: what happens once a step (the reduction of gradients, the optimizer, ZeRO's gathers), memory, and selective
recomputation. A kernel that fuses attention has no primitive of its own: where the job has one, operations on the scores are
taken out and the closed form's kernel put in. What can go wrong: `models/` cannot build the part; UnbuildablePart says why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from autopar.catalogue import PlannerOptions
from autopar.commands.model_parts import DATA, EXPERT, PartStep, part_step
from autopar.cost_model.job_prediction import JobPrediction, Part, predict_with
from autopar.cost_model.machine import Cluster
from autopar.cost_model.operations import Exchange, ExchangeKind, Group, MatrixProduct, Operation, Timed, Work
from autopar.cost_model.prices import DTYPES, FITTED
from autopar.cost_model.training_job import TrainingJob
from autopar.cost_model.transformer import LayerSplit, attention_core
from autopar.cost_model.transformer_shape import TransformerShape
from autopar.errors import AutoparError
from autopar.mesh import LogicalMesh
from autopar.plan import CollectivePlan
from autopar.planner import PlanRequest, plan_step
from autopar.rules import entry_for
from autopar.trace import CallSignature, bind_arguments, trace

_KINDS: dict[str, ExchangeKind] = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-to-all": "all-to-all",
    "collective-permute": "permute",
}
_CLOSED = ("stem", "classifier")
"""Parts of a residual network that are not planned: 2 % of its work."""


@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """What a plan says of one microbatch on one device: seconds of contractions and of all else, each in a loop of its own,
    and its collectives, with how often each happens. `gradient_bytes`: what is reduced over data ranks, once a step."""

    contraction_s: float
    other_s: float
    exchanges: tuple[tuple[Exchange, int], ...]
    gradient_bytes: float
    operations: int


class PartPlanner:
    """Plans parts, each distinct one once."""

    def __init__(self) -> None:
        self._known: dict[Any, PlannedPart] = {}

    def plan(self, cluster: Cluster, part: Part, job: TrainingJob) -> PlannedPart:
        """The plan of a part. Raises UnbuildablePart."""
        shape = dataclasses.replace(part.shape, layers=1) if isinstance(part.shape, TransformerShape) else part.shape
        one = dataclasses.replace(part, shape=shape)
        key = (cluster.fingerprint(), one, job.zero_stage, job.precision)
        if key not in self._known:
            step = part_step(one, zero_stage=job.zero_stage, precision=job.precision)
            self._known[key] = _planned(cluster, one, step)
        return self._known[key]

    @property
    def plans(self) -> int:
        """How many distinct parts were planned."""
        return len(self._known)

    def work(self, cluster: Cluster, job: TrainingJob, part: Part, closed: Work) -> Work:
        """The closed form's work with the plan's seconds and collectives in the place of its own."""
        if part.kind in _CLOSED:
            return closed
        planned = self.plan(cluster, part, job)
        contraction_s = planned.contraction_s * _as_convolutions(cluster, part, job)
        seconds = contraction_s / FITTED.matrix + planned.other_s / FITTED.memory
        whole = (*closed.forward, *closed.recomputed, *closed.backward)
        share = _flops(closed.forward) / _flops(whole) if _flops(whole) else 0.5
        exchanges = tuple(exchange for exchange, count in planned.exchanges for _ in range(count))
        forward: tuple[Operation, ...] = (Timed(seconds * share),)
        backward: tuple[Operation, ...] = (Timed(seconds * (1 - share)), *exchanges)
        selective: tuple[Operation, ...] = ()
        if isinstance(part.split, LayerSplit) and part.split.recompute == "selective":
            selective = closed.recomputed
        if _has_kernel(part):
            assert isinstance(part.shape, TransformerShape)
            assert isinstance(part.split, LayerSplit)
            ahead, behind = attention_core(part.shape, part.split)
            times = 2 if part.kind == "decoder" else 1
            forward, backward = (*forward, *ahead * times), (*backward, *behind * times)
        return dataclasses.replace(closed, forward=forward, backward=backward, recomputed=selective)


def planned_prediction(planner: PartPlanner, cluster: Cluster, job: TrainingJob) -> tuple[JobPrediction | None, str]:
    """The prediction of a job whose microbatch and virtual stages are known, its parts planned; or None and the reason."""
    try:
        return predict_with(cluster, job, functools.partial(planner.work, cluster, job)), ""
    except (ValueError, AutoparError) as error:
        return None, str(error)


def _as_convolutions(cluster: Cluster, part: Part, job: TrainingJob) -> float:
    """How much longer convolutions take than the products as which the planner prices them."""
    device, dtype = cluster.device, DTYPES[job.precision]
    if isinstance(part.shape, TransformerShape):
        return 1.0
    return device.efficiency_of(dtype).best / device.convolution_efficiency_of(dtype).best


def _has_kernel(part: Part) -> bool:
    return isinstance(part.split, LayerSplit) and part.split.fused_attention and part.kind not in ("embedding", "head")


def _flops(operations: Sequence[Operation]) -> float:
    return sum(op.flops for op in operations if isinstance(op, MatrixProduct))


def _planned(cluster: Cluster, part: Part, step: PartStep) -> PlannedPart:
    signature = CallSignature(step.run, (), (), "auto")
    traced = trace(signature, bind_arguments(signature, (step.state,), {}))
    request = PlanRequest((LogicalMesh.of(step.axes),), cluster, None, step.constraints, PlannerOptions())
    plan, assignment = plan_step(traced, request)
    seconds = {True: 0.0, False: 0.0}
    for equation, each, trips in assignment.seconds:
        if not (_has_kernel(part) and _touches_scores(equation, part)):
            seconds[entry_for(equation).heavy] += each * trips
    exchanges, gradients = exchanges_of(plan.collectives, jax.tree.leaves(step.state["grads"]))
    return PlannedPart(seconds[True], seconds[False], exchanges, gradients, len(traced.program.equations))


def _touches_scores(equation: Any, part: Part) -> bool:
    """Whether an operation reads or writes the scores (B, N, S, S)."""
    assert isinstance(part.shape, TransformerShape)
    scores = (part.shape.heads, part.shape.seq_len, part.shape.seq_len)
    shapes = [tuple(value.aval.shape) for value in (*equation.invars, *equation.outvars)]
    return any(len(shape) == 4 and shape[1:] == scores for shape in shapes)


def exchanges_of(
    collectives: Sequence[CollectivePlan], gradients: Sequence[Any]
) -> tuple[tuple[tuple[Exchange, int], ...], float]:
    """Collectives of a microbatch as the plan prices them, and the bytes of gradients that are reduced over data ranks.

    Sums over data ranks are gradients. A gather over them of what has a parameter's shape is the other half of such a sum, or
    ZeRO 3's. Sums of biases and norms over tensor ranks that have tokens of their own are gradients as well; they come once a
    step, and no framework counts them.
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
        elif item.bytes > widest and not (over_data and of_parameter):
            group: Group = "expert" if EXPERT in item.axes else "data" if DATA in item.axes else "tensor"
            exchange = Exchange(_KINDS[item.kind], group, float(item.bytes), seconds=float(item.predicted_s))
            found[exchange] += round(item.count)
    return tuple(sorted(found.items(), key=lambda pair: (pair[0].kind, pair[0].full_bytes))), reduced
