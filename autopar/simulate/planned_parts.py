"""A training job's step as the ordinary planner plans its parts on a simulated cluster.

In: a cluster, a job (`TrainingJob`) whose microbatch and virtual stages are known. Out: a `JobPrediction`: each part of a stage,
a block, the embedding, the head, takes the seconds, the collectives and the memory of its own plan (`part_plans`). Equal parts
of different rows are planned once. The closed form puts the parts together: the schedule, what happens once a step (the reduction
of gradients, the optimizer, ZeRO's gathers), parameters and states, and what the ends keep. A kernel that fuses attention has no
primitive of its own: where the job has one, operations on the scores are taken out and the closed form's kernel put in.
What can go wrong: `models/` cannot build the part; UnbuildablePart says why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence

from autopar.cost_model.device import Device
from autopar.cost_model.machine import Cluster
from autopar.errors import AutoparError
from autopar.forks.jobs import run_side_by_side
from autopar.program.step import TracedStep
from autopar.progress import enter
from autopar.simulate.closed_forms.attention import attention_core
from autopar.simulate.closed_forms.job_prediction import JobPrediction, Part, Timing, predict_with, stages_of
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.operations import MatrixProduct, Operation, Timed, Work
from autopar.simulate.closed_forms.prices import DTYPES, FITTED_PLANS, InTraining
from autopar.simulate.closed_forms.stage_work import Precision
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.model_parts import PartProgram, UnbuildablePart, part_program, planned_step, program_key
from autopar.simulate.part_plans import PlannedPart, Seconds, has_kernel, plan_part, trace_part

_CLOSED = ("stem", "classifier")
"""Parts of a residual network that are not planned: 2 % of its work."""
_ENDS = ("embedding", "head")


class PartPlanner:
    """Plans parts, each distinct one once. `reached`: what operations reach in training of what they reach in a loop."""

    def __init__(self, *, reached: InTraining = FITTED_PLANS) -> None:
        self.reached = reached
        self._known: dict[_Key, PlannedPart] = {}
        self._programs: dict[Hashable, tuple[PartProgram, TracedStep]] = {}

    def plan(self, cluster: Cluster, part: Part, job: TrainingJob) -> PlannedPart:
        """The plan of a part. Raises UnbuildablePart."""
        key = _key_of(cluster, part, job)
        if key not in self._known:
            self._known[key] = self._plan(cluster, key)
        return self._known[key]

    def _plan(self, cluster: Cluster, key: _Key) -> PlannedPart:
        program, traced = self._program(key)
        step = planned_step(key.part, program, zero_stage=key.zero_stage, whole_gradients=key.whole_gradients)
        return plan_part(cluster, key.part, step, zero_stage=key.zero_stage, traced=traced)

    def _program(self, key: _Key) -> tuple[PartProgram, TracedStep]:
        """The part's program, traced once for all plans and clusters."""
        wanted = program_key(key.part, precision=key.precision)
        if wanted not in self._programs:
            program = part_program(key.part, precision=key.precision)
            self._programs[wanted] = program, trace_part(program)
        return self._programs[wanted]

    def plan_ahead(self, jobs: Iterable[tuple[Cluster, TrainingJob]], *, processes: int) -> None:
        """Plan all parts of these jobs, side by side. What cannot be planned is left: who asks for it gets the error."""
        wanted: dict[_Key, Cluster] = {}
        for cluster, job in jobs:
            for part in _parts_of(job):
                machine = _machine_of(cluster, part)
                wanted.setdefault(_key_of(machine, _as_priced(part, job), job), machine)
        new = [key for key in wanted if key not in self._known and self._is_traced(key)]
        enter("planning the parts of all rows")
        found = run_side_by_side([functools.partial(self._try, wanted[key], key) for key in new], processes=processes)
        self._known.update((key, one) for key, one in zip(new, found, strict=True) if one is not None)

    def _is_traced(self, key: _Key) -> bool:
        """Whether the part can be built; this process traces it, as forks of it must not."""
        try:
            self._program(key)
        except (ValueError, AutoparError):
            return False
        return True

    def _try(self, cluster: Cluster, key: _Key) -> PlannedPart | None:
        try:
            return self._plan(cluster, key)
        except (ValueError, AutoparError):
            return None

    @property
    def plans(self) -> int:
        """How many distinct parts were planned."""
        return len(self._known)

    def predict(self, cluster: Cluster, job: TrainingJob) -> JobPrediction:
        """The prediction of a job. Raises UnbuildablePart, or an AutoparError if the row's plan cannot be stated."""
        if reason := _closed_column(job):
            raise UnbuildablePart(reason)
        return predict_with(cluster, job, self.timing(cluster, job), reached=self.reached)

    def timing(self, cluster: Cluster, job: TrainingJob) -> Timing:
        """From a part and its closed form to its plan's work."""
        return functools.partial(self._work, cluster, job)

    def _work(self, cluster: Cluster, job: TrainingJob, part: Part, closed: Work) -> Work:
        """The closed form's work with the plan's seconds, collectives and memory in the place of its own."""
        if part.kind in _CLOSED:
            return closed
        cluster = _machine_of(cluster, part)
        device = cluster.device
        planned = self.plan(cluster, _as_priced(part, job), job)
        whole = (*closed.forward, *closed.recomputed, *closed.backward)
        share = _flops(closed.forward) / _flops(whole) if _flops(whole) else 0.5
        # What the planner prices is a loop's; a training step keeps the sustained part of it.
        slower = 1 / device.sustained.get(DTYPES[job.precision], 1.0)
        seconds = self._seconds(planned.work, slower, device)
        exchanges = tuple(exchange for exchange, count in planned.exchanges for _ in range(count))
        forward: tuple[Operation, ...] = (Timed(seconds * share),)
        backward: tuple[Operation, ...] = (Timed(seconds * (1 - share)), *exchanges)
        selective = isinstance(part.split, LayerSplit) and part.split.recompute == "selective"
        again: tuple[Operation, ...] = ()
        if has_kernel(part):
            assert isinstance(part.shape, TransformerShape)
            assert isinstance(part.split, LayerSplit)
            ahead, behind = attention_core(part.shape, part.split)
            times = 2 if part.kind == "decoder" else 1
            forward, backward = (*forward, *ahead * times), (*backward, *behind * times)
            again = ahead * times if part.split.recompute == "full" else ()
        elif selective:
            again = (Timed(self._seconds(planned.scores, slower, device)),)
        work = dataclasses.replace(closed, forward=forward, backward=backward, recomputed=again)
        if part.kind in _ENDS:
            return work
        scores = (0.0, planned.scores_bytes) if selective else (planned.scores_bytes, 0.0)
        kept, transient = planned.kept_bytes + scores[0], planned.again_bytes + scores[1]
        return dataclasses.replace(work, kept_bytes=kept, transient_bytes=transient)

    def _seconds(self, found: Seconds, slower: float, device: Device) -> float:
        kernels_s = found.other_s * device.kernel_efficiency / self.reached.memory
        return found.contraction_s * slower / self.reached.matrix + kernels_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Key:
    """What decides a part's plan."""

    cluster: str
    part: Part
    zero_stage: int
    whole_gradients: bool
    precision: Precision


def _key_of(cluster: Cluster, part: Part, job: TrainingJob) -> _Key:
    return _Key(
        cluster=cluster.fingerprint(),
        part=_as_planned(part),
        zero_stage=job.zero_stage if _divides(job) else 0,
        whole_gradients=_divides(job) and not job.divides_gradients,
        precision=job.precision,
    )


def _divides(job: TrainingJob) -> bool:
    """Whether data ranks keep parts of parameters or gradients, so that it shows in one microbatch."""
    return job.zero_stage >= 3 or job.divides_gradients


def _closed_column(job: TrainingJob) -> str:
    """The column that only the closed form prices and why; empty if there is none."""
    if job.context_ranks > 1:
        fact = f"column 'context_parallel' is {job.context_ranks}"
        return f"{fact}: models/ builds layers of whole sequences, so only the closed form prices it"
    if job.recompute == "dots":
        return "column 'recompute' is 'dots': a part's plan repeats all of it or its scores, so only the closed form prices it"
    if job.precision == "fp8":
        return "column 'precision' is 'fp8': models/ multiplies in bf16, so only the closed form prices casts and 8-bit products"
    return ""


def _parts_of(job: TrainingJob) -> list[Part]:
    """The distinct parts of a job that are planned; none if a column says that they cannot be."""
    if _closed_column(job):
        return []
    found: dict[Part, None] = {}

    def note(part: Part, work: Work) -> Work:
        found[part] = None
        return work

    stages_of(job, note)
    return [part for part in found if part.kind not in _CLOSED]


def _machine_of(cluster: Cluster, part: Part) -> Cluster:
    """The nodes on which a part runs."""
    return cluster.of_kind(part.device_kind) if part.device_kind else cluster


def _as_priced(part: Part, job: TrainingJob) -> Part:
    """The part on as many data ranks as make a difference to its price.

    Where data ranks keep nothing in parts one rank does what all do, and what is summed over them comes once a step or once a
    microbatch, in closed form. The ranks among which experts are shared are left.
    """
    experts = part.split.expert_ranks if isinstance(part.split, LayerSplit) else 1
    if _divides(job) or part.split.samples != round(part.split.samples):
        return part
    return dataclasses.replace(part, data_ranks=min(part.data_ranks, experts))


def _as_planned(part: Part) -> Part:
    """The part without what makes no difference to its plan: its model's depth, and recomputation of less than a whole block."""
    shape, split = part.shape, part.split
    if isinstance(shape, TransformerShape):
        shape = dataclasses.replace(shape, layers=1, decoder_layers=None)
    if isinstance(split, LayerSplit) and (split.recompute == "selective" or part.kind in _ENDS):
        split = dataclasses.replace(split, recompute="none")
    if isinstance(split, LayerSplit):
        split = dataclasses.replace(split, gradient_owners=1)  # as the ZeRO stage says
    return dataclasses.replace(part, shape=shape, split=split)


def planned_prediction(planner: PartPlanner, cluster: Cluster, job: TrainingJob) -> tuple[JobPrediction | None, str]:
    """The prediction of a job whose microbatch and virtual stages are known, its parts planned; or None and the reason."""
    try:
        return planner.predict(cluster, job), ""
    except (ValueError, AutoparError) as error:
        return None, str(error)


def _flops(operations: Sequence[Operation]) -> float:
    return sum(op.flops for op in operations if isinstance(op, MatrixProduct))
