"""A plan: what was decided, what it should cost, and nothing that runs.

Frozen data with a versioned JSON form. A plan can be made on one machine, read, compared and kept in a repository, and used
on another with `parallelize(..., plan=...)`. It holds the layout of every input and output, the layouts chosen for every
equation (so that lowering needs no solver), every collective with its bytes, and the predictions. What can go wrong: a
plan for another program or another version; `fingerprint` and `version` tell.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from autopar.errors import PlanError

VERSION = 1
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class ValuePlan:
    """One input or output leaf: `spec` has one entry per dimension, the mesh axes that split it, () if it is whole."""

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes_per_device: int

    @property
    def partition_spec(self) -> PartitionSpec:
        """The layout as JAX writes it."""
        return PartitionSpec(*(axes or None for axes in self.spec))


@dataclasses.dataclass(frozen=True)
class CollectivePlan:
    """One collective: over which axes, `bytes` per device on its larger side, `count` times per step."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: float
    operand: str
    source: str
    predicted_s: float


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """One of the values alive at the predicted memory peak."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A logical mesh that was compared, with the predicted step time of its best plan.

    Where the search ended without one: `at_least_s`, below which no plan on this mesh is, or None if none fits the memory.
    """

    mesh_shape: tuple[int, ...]
    step_s: float | None
    at_least_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A way to run the step that was compared: `step_s` if it was planned, `estimate_s` if it was only estimated.

    Neither: it cannot be, because nothing fits the memory or the step cannot be cut like this. `num_stages` counts virtual ones.
    """

    num_stages: int
    num_microbatches: int
    schedule: str = ""
    virtual_stages: int = 1
    recompute: bool = False
    step_s: float | None = None
    estimate_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """See the module's text. Times in seconds, sizes in bytes per device. `recompute`: backward repeats layers' forward work.

    `candidates`: the meshes that were compared; `compared`: numbers of microbatches and recomputation, if several were.
    `unlimited_s`: about what the best plan without the memory limit would take, as far as that was searched.
    """

    fingerprint: str
    cluster: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    inputs: tuple[ValuePlan, ...]
    outputs: tuple[ValuePlan, ...]
    choices: tuple[int, ...]
    collectives: tuple[CollectivePlan, ...]
    compute_s: float
    comm_s: float
    peak_bytes: int
    memory_limit_bytes: int | None
    peak_tensors: tuple[LiveTensor, ...]
    planning_s: float
    lower_bound_s: float
    allow_redundant_compute: bool
    candidates: tuple[Candidate, ...] = ()
    copy_span: int | None = None
    num_microbatches: int = 1
    recompute: bool = False
    compared: tuple[Alternative, ...] = ()
    unlimited_s: float = 0.0
    version: int = VERSION

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return self.compute_s + self.comm_s

    @property
    def is_optimal(self) -> bool:
        """Whether the solver proved that no plan of the model is better."""
        return self.step_s <= self.lower_bound_s * (1 + 1e-6) + 1e-12

    def input(self, path: str) -> ValuePlan:
        """The input leaf with this path; PlanError names the nearest paths if there is none."""
        return _find(self.inputs, path)

    def output(self, path: str) -> ValuePlan:
        """The output leaf with this path."""
        return _find(self.outputs, path)

    def partition_specs(self) -> Mapping[str, PartitionSpec]:
        """PartitionSpec of every input leaf, by path."""
        return {value.path: value.partition_spec for value in self.inputs}

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back to an equal plan."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from `to_json`'s text; PlanError if it is not one, or of another version."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a plan: invalid JSON: {error}") from None
        if not isinstance(fields, dict) or "version" not in fields:
            raise PlanError("not a plan: a JSON object with a 'version' is expected")
        if fields["version"] != VERSION:
            raise PlanError(f"plan of version {fields['version']}, this autopar reads version {VERSION}: plan again")
        fields.setdefault("recompute", False)  # plans of version 1 from before it could be done on one mesh
        fields.setdefault("compared", [])  # and from before numbers of microbatches were compared
        fields.setdefault("unlimited_s", 0.0)
        _check_fields(cls, fields, "")
        nested = {"inputs": ValuePlan, "outputs": ValuePlan, "collectives": CollectivePlan}
        nested |= {"peak_tensors": LiveTensor, "candidates": Candidate, "compared": Alternative}
        for name, kind in nested.items():
            if not isinstance(fields[name], list) or not all(isinstance(item, dict) for item in fields[name]):
                raise PlanError(f"not a plan of version {VERSION}: {name}: a list of objects is expected")
            for item in fields[name]:
                _check_fields(kind, item, f"{name}: ")
            fields[name] = [kind(**{key: _tuples(value) for key, value in item.items()}) for item in fields[name]]
        return cls(**{key: _tuples(value) for key, value in fields.items()})


def _check_fields(kind: type[Any], fields: Mapping[str, Any], where: str) -> None:
    known = {f.name for f in dataclasses.fields(kind)}
    missing, unknown = sorted(known - set(fields)), sorted(set(fields) - known)
    if missing or unknown:
        raise PlanError(f"not a plan of version {VERSION}: {where}missing fields {missing}, unknown fields {unknown}")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _find(values: tuple[ValuePlan, ...], path: str) -> ValuePlan:
    for value in values:
        if value.path == path:
            return value
    word = path.rsplit("/", 1)[-1]
    near = [value.path for value in values if fnmatch.fnmatch(value.path, f"*{word}*")] or [v.path for v in values]
    raise PlanError(f"no leaf {path!r}; there are {', '.join(near[:6])}{', ...' if len(near) > 6 else ''}")
