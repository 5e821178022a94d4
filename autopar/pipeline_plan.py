"""The plan of a pipeline: what was decided for the whole step, and a `Plan` for every stage; nothing that runs.

Frozen data with a versioned JSON form, as `plan.py` has for one mesh. Times in seconds, sizes in bytes per device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from autopar.cost_model.hardware import Cluster
from autopar.errors import PlanError
from autopar.files.checked import Fields
from autopar.files.json_form import build, text_of
from autopar.files.plan_file import VERSION, is_pipeline, load_plan
from autopar.plan import Alternative, Plan, ValuePlan, no_leaf
from autopar.presented.methods import Presented

ONCE = ("update", "weights")
"""Transfers that happen once per step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a pipeline.

    Attributes:
        stage: its number, virtual stages counted.
        mesh: the number of the mesh that it runs on.
        first_device: the place of its first device among the step's; the others follow.
        leaves: paths of the state's leaves, or pieces of leaves such as `state/params/w[0:2]`, that live here.
        forward_s: predicted seconds of the forward pass of one microbatch.
        backward_s: predicted seconds of the backward pass of one microbatch.
        once_s: predicted seconds of what happens once per step, such as the update.
        microbatches_in_flight: microbatches that have gone forward and not yet backward, at the most.
        peak_bytes: its part of the predicted peak of one device of its mesh, with all microbatches in flight: all of it where the
            mesh has one stage. `plan.peak_bytes` is that of the stage alone with one microbatch.
        plan: layouts and collectives of the stage's programs, on its mesh.
        recomputed_share: the part of its forward work, from the beginning, that its backward repeats; 0 to 1.
        state_bytes: what of the peak is weights and the optimizer's state, and inputs that lie there for the whole step.
        sum_bytes: what of it is sums over microbatches, such as gradients.
        microbatch_bytes: what each microbatch in flight keeps between forward and backward.
        in_flight_bytes: what all of them keep: at the most, where a split backward lets go of a part of it before the weight
            gradient; at the peak of the mesh, where that has several stages.
        node_kind: the name of its kind of node in a mixed cluster; empty where all nodes are alike.
    """

    stage: int
    mesh: int
    first_device: int
    leaves: tuple[str, ...]
    forward_s: float
    backward_s: float
    once_s: float
    microbatches_in_flight: int
    peak_bytes: int
    plan: Plan
    recomputed_share: float = 0.0
    state_bytes: int = 0
    sum_bytes: int = 0
    microbatch_bytes: int = 0
    in_flight_bytes: int = 0
    node_kind: str = ""

    @property
    def devices(self) -> range:
        """The places of its devices among the step's."""
        return range(self.first_device, self.first_device + self.plan.num_devices)

    @property
    def working_bytes(self) -> int:
        """What is left of the peak: what tasks need while they run, and what they hand to each other."""
        return max(0, self.peak_bytes - self.state_bytes - self.sum_bytes - self.in_flight_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """What one stage sends to another.

    Attributes:
        source: the stage that sends.
        target: the stage that receives.
        what: what needs it: `forward` or `backward` passes, the `update`, or `weights` that live on another mesh.
        bytes: of all arrays together, each time.
        count: times per step.
        predicted_s: seconds, each time.
        arrays: their number.
        is_work: whether the sending mesh computes nothing meanwhile, as its devices and the host that sends share their cores.
    """

    source: int
    target: int
    what: str
    bytes: int
    count: int
    predicted_s: float
    arrays: int = 1
    is_work: bool = False


def sent_once_s(transfers: Iterable[TransferPlan]) -> float:
    """Seconds of the transfers that happen once per step: the longest, beside which all others run.

    Those that are work of a mesh are made one after the other.
    """
    by_stage: dict[int, float] = {}
    for item in transfers:
        if item.what in ONCE:
            before_s = by_stage.get(item.source, 0.0)
            by_stage[item.source] = before_s + item.predicted_s if item.is_work else max(before_s, item.predicted_s)
    return max(by_stage.values(), default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PipelinePlan(Presented):
    """What was decided for a step in pipeline stages, and what that should cost.

    Attributes:
        fingerprint: tells the traced program that the plan is for.
        trail: two digits for each of its equations, by which another program is told where it differs.
        cluster: the name of the cluster whose figures the predictions use.
        num_microbatches: parts of the batch, one after the other.
        schedule: the order of work, by a name that `parallelize` takes.
        virtual_stages: stages on each mesh.
        cuts: places in the chain of forward equations where a stage ends.
        stages: the stages, each with a plan of its own.
        transfers: what crosses between meshes.
        step_s: predicted seconds per step.
        bubble: seconds that the busiest mesh waits, over the seconds that it works.
        memory_limit_bytes: the limit that every stage keeps, per device; None if there is none.
        planning_s: seconds that planning took.
        recompute: whether the backward pass repeats forward work; the stages say how much of it.
        keeps_named: whether it keeps values that `jax.ad_checkpoint.checkpoint_name` names.
        phases_from: the number of microbatches whose phases, before, in and after the loop over microbatches, were taken over;
            None: they were sought for this number.
        scan_cuts: for each stack of scanned layers, the layers at which its range is divided between stages.
        compared: the numbers of microbatches and schedules, if several were compared.
        ended_early: whether planning ended before everything was compared, as its time was over or it was stopped.
        not_compared: what it left out then, in words.
        lower_bound_s: under the cost model no plan on as many devices is faster, in stages or on one mesh, whatever its cuts,
            submeshes, microbatches, schedule and recomputation, and whatever the memory; 0: no bound is known.
        flops: operations of the step's contractions and convolutions, on all devices together, each counted once; 0: not known.
        at_peak_s: seconds per step that these would take at the devices' peak.
        assumed_finite: as in a `Plan`, of all stages.
        version: of the JSON form.
    """

    fingerprint: str
    trail: str
    cluster: str
    num_microbatches: int
    schedule: str
    virtual_stages: int
    cuts: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    transfers: tuple[TransferPlan, ...]
    step_s: float
    bubble: float
    memory_limit_bytes: int | None
    planning_s: float
    recompute: bool = False
    keeps_named: bool = False
    phases_from: int | None = None
    scan_cuts: tuple[tuple[int, ...], ...] = ()
    compared: tuple[Alternative, ...] = ()
    ended_early: bool = False
    not_compared: tuple[str, ...] = ()
    lower_bound_s: float = 0.0
    flops: float = 0.0
    at_peak_s: float = 0.0
    assumed_finite: tuple[str, ...] = ()
    version: int = VERSION

    def devices_by_kind(self) -> dict[str, int]:
        """How many devices of each kind of node it uses; where nodes are alike, or counted as alike, their kind is empty."""
        counts: dict[str, int] = {}
        for stage in self.stages[: self.num_stages // self.virtual_stages]:
            counts[stage.node_kind] = counts.get(stage.node_kind, 0) + stage.plan.num_devices
        return counts

    @property
    def num_stages(self) -> int:
        """Number of stages; virtual ones count."""
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        """Devices of all meshes."""
        return sum(stage.plan.num_devices for stage in self.stages) // self.virtual_stages

    @property
    def recomputed_shares(self) -> tuple[float, ...]:
        """The part of each stage's forward work that backward repeats."""
        return tuple(stage.recomputed_share for stage in self.stages)

    def transfer_s(self, transfer: TransferPlan, cluster: Cluster) -> float:
        """Predicted seconds of one of its transfers, `transfer`, on a `cluster`, whichever it was planned for."""
        source, target = (self.stages[end].devices for end in (transfer.source, transfer.target))
        return cluster.transfer_s(transfer.bytes, source=source, target=target, arrays=transfer.arrays)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of the fullest device; the stages of one mesh add up."""
        meshes = {stage.mesh for stage in self.stages}
        return max(sum(s.peak_bytes for s in self.stages if s.mesh == mesh) for mesh in meshes)

    def input(self, path: str) -> ValuePlan:
        """The input leaf `path`, as the first stage has it that reads it or a piece of it; PlanError if there is none."""
        for stage in self.stages:
            for value in stage.plan.inputs:
                if _is_or_has(path, value.path):
                    return value
        read = (value for stage in self.stages for value in stage.plan.inputs if value.role in ("state", "batch"))
        raise no_leaf(path, list(dict.fromkeys(value.path for value in read)))

    def stage_of(self, path: str) -> int:
        """The number of the stage where the leaf `path`, or its first piece, lives; PlanError if there is no such leaf."""
        for stage in self.stages:
            if any(_is_or_has(path, leaf) for leaf in stage.leaves):
                return stage.stage
        raise PlanError(f"no leaf {path!r} lives on any of the {len(self.stages)} stages")

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back to an equal plan."""
        return text_of({"kind": "pipeline", "version": self.version, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """A plan from the `text` that `to_json` wrote.

        Raises:
            PlanError: the text is not such a plan, or one of another version.
        """
        fields = load_plan(text)
        if not is_pipeline(fields):
            raise PlanError("the plan of one mesh; Plan.from_json, or autopar.plan_from_json, reads it")
        return _build(fields)


def plan_from_json(text: str) -> Plan | PipelinePlan:
    """A plan of either kind from the text that its `to_json` wrote.

    Args:
        text: JSON, as a file of `autopar plan -o` holds it.

    Returns:
        A plan that equals the one that was written.

    Raises:
        PlanError: the text is not a plan, or a plan of another version.
    """
    return _of_fields(load_plan(text))


def kept_plan_from_json(text: str) -> Plan | PipelinePlan:
    """As `plan_from_json`, of text that is known to be what `to_json` wrote, in this version: it is not checked."""
    return _of_fields(json.loads(text))


def _of_fields(fields: Fields) -> Plan | PipelinePlan:
    return _build(fields) if is_pipeline(fields) else build(Plan, fields)


def _build(fields: Fields) -> PipelinePlan:
    return build(PipelinePlan, {name: value for name, value in fields.items() if name != "kind"})


def _is_or_has(path: str, leaf: str) -> bool:
    """Whether a leaf is the one with this path, or a piece of it, such as `path[0:2]`."""
    return leaf == path or leaf.startswith(f"{path}[")
