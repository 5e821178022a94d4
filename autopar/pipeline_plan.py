"""The plan of a pipeline: what was decided for the whole step, and a `Plan` for every stage; nothing that runs.

Frozen data with a versioned JSON form, as `plan.py` has for one mesh. Times in seconds, sizes in bytes per device.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from autopar.cost_model.hardware import Cluster
from autopar.errors import PlanError
from autopar.plan import Alternative, Plan, ValuePlan

VERSION = 1


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage: the devices `first_device` and following, its layouts, and its seconds per microbatch and per step.

    `peak_bytes` counts the microbatches in flight; `plan.peak_bytes` only one. `leaves` are the paths that live here.
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


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """What one stage sends another: `bytes` of all arrays together, `count` times a step."""

    source: int
    target: int
    what: str
    bytes: int
    count: int
    predicted_s: float


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """See the module's text. `cuts` are places in the chain of forward equations; `recompute`: backward repeats forward work.

    `scan_cuts`: for each stack of layers that is scanned over, the layers at which the scan is divided before that.
    `compared`: numbers of microbatches and schedules, if several were.
    """

    fingerprint: str
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
    scan_cuts: tuple[tuple[int, ...], ...] = ()
    compared: tuple[Alternative, ...] = ()
    version: int = VERSION

    @property
    def num_stages(self) -> int:
        """Number of stages, virtual ones counted."""
        return len(self.stages)

    def transfer_s(self, transfer: TransferPlan, cluster: Cluster) -> float:
        """Seconds of one of its transfers on a cluster."""
        ends = (math.prod(self.stages[end].plan.mesh_shape) for end in (transfer.source, transfer.target))
        return cluster.transfer_s(transfer.bytes, meshes=self.num_stages // self.virtual_stages, devices=min(ends))

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any device; stages on one mesh add up."""
        meshes = {stage.mesh for stage in self.stages}
        return max(sum(s.peak_bytes for s in self.stages if s.mesh == mesh) for mesh in meshes)

    def input(self, path: str) -> ValuePlan:
        """The input leaf with this path, on the first stage that has it or a piece of it; PlanError if there is none."""
        for stage in self.stages:
            for value in stage.plan.inputs:
                if _is_or_has(path, value.path):
                    return value
        raise PlanError(f"no leaf {path!r} on any of the {len(self.stages)} stages")

    def stage_of(self, path: str) -> int:
        """The stage where a leaf, or its first piece, lives; PlanError if there is no such leaf."""
        for stage in self.stages:
            if any(_is_or_has(path, leaf) for leaf in stage.leaves):
                return stage.stage
        raise PlanError(f"no leaf {path!r} lives on any of the {len(self.stages)} stages")

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back to an equal plan."""
        return json.dumps({"kind": "pipeline", **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """A plan from `to_json`'s text; PlanError if it is not one, or of another version."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a plan: invalid JSON: {error}") from None
        if not isinstance(fields, dict) or fields.pop("kind", None) != "pipeline":
            raise PlanError("not the plan of a pipeline: a JSON object whose 'kind' is 'pipeline' is expected")
        if fields.get("version") != VERSION:
            raise PlanError(
                f"plan of version {fields.get('version')}, this autopar reads version {VERSION}: plan again"
            )
        fields.setdefault("scan_cuts", ())  # plans of version 1 from before scans were divided
        fields.setdefault("compared", ())  # and from before timetables were compared
        _check(cls, fields)
        fields["compared"] = tuple(_alternative(one) for one in fields["compared"])
        fields["stages"] = tuple(_stage(stage) for stage in fields["stages"])
        fields["transfers"] = tuple(TransferPlan(**transfer) for transfer in fields["transfers"])
        fields["cuts"] = tuple(fields["cuts"])
        fields["scan_cuts"] = tuple(tuple(cuts) for cuts in fields["scan_cuts"])
        return cls(**fields)


def _is_or_has(path: str, leaf: str) -> bool:
    """Whether a leaf is the one with this path, or a piece of it, such as `path[0:2]`."""
    return leaf == path or leaf.startswith(f"{path}[")


def _alternative(fields: dict[str, Any]) -> Alternative:
    _check(Alternative, fields)
    return Alternative(**fields)


def _stage(fields: dict[str, Any]) -> StagePlan:
    _check(StagePlan, fields)
    plan = Plan.from_json(json.dumps(fields["plan"]))
    return StagePlan(**{**fields, "plan": plan, "leaves": tuple(fields["leaves"])})


def _check(kind: type[Any], fields: dict[str, Any]) -> None:
    known = {f.name for f in dataclasses.fields(kind)}
    missing, unknown = sorted(known - set(fields)), sorted(set(fields) - known)
    if missing or unknown:
        raise PlanError(f"not a pipeline plan of version {VERSION}: missing fields {missing}, unknown fields {unknown}")


def plan_from_json(text: str) -> Plan | PipelinePlan:
    """A plan of either kind from its JSON text."""
    try:
        kind = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"not a plan: invalid JSON: {error}") from None
    is_pipeline = isinstance(kind, dict) and kind.get("kind") == "pipeline"
    return PipelinePlan.from_json(text) if is_pipeline else Plan.from_json(text)
