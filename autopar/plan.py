"""A plan: what was decided, what it should cost, and nothing that runs.

Frozen data with a versioned JSON form. A plan can be made on one machine, read, compared and kept in a repository, and used
on another with `parallelize(..., plan=...)`. It holds the layout of every input and output, those of every equation (so
that lowering needs no solver), every collective with its bytes, and the predictions. What can go wrong: a plan for another
program or another version; `fingerprint` and `version` tell, and `trail` where the programs begin to differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from autopar.errors import ConstraintError, OutOfMemoryError, PlanError
from autopar.files.json_form import build, text_of
from autopar.files.plan_file import VERSION, is_pipeline, load_plan
from autopar.presented.methods import Presented

WITHIN = "within"
"""The `CollectivePlan.overlap` of what devices exchange while an operation runs."""
Spec = tuple[tuple[str, ...], ...]


_NAMED = 6
"""So many paths are named where a leaf is not found."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValuePlan:
    """The layout of one input or output leaf.

    Attributes:
        path: the argument's name and the keys below it, such as `state/params/up`; outputs begin with `output`.
        role: `state`, `batch`, `other`, `const` (an array that the step closes over) or `output`.
        shape: the shape of the whole array.
        dtype: its element type, as JAX names it.
        spec: for each dimension the mesh axes that split it, major to minor; () where it is whole.
        bytes_per_device: what one device stores.
        from_forward: whether the forward pass of another stage sends it.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    bytes_per_device: int
    from_forward: bool = False

    @property
    def partition_spec(self) -> PartitionSpec:
        """The layout as JAX writes it."""
        return PartitionSpec(*(axes or None for axes in self.spec))


@dataclasses.dataclass(frozen=True)
class NamedLayout:
    """A layout that operations take or give.

    Attributes:
        name: what the plan's strategies call it, such as `[x, -]`.
        spec: for each dimension the mesh axes that split it, major to minor; () where it is whole.
        partial: pairs of an axis along which devices hold terms, and how these are combined.
    """

    name: str
    spec: Spec
    partial: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class NamedStrategy:
    """A way in which an operation is done: the names of the layouts of its operands and results.

    Control flow has none of its own but the layouts in which the branches of a cond hand over their results.
    """

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RegisteredRule:
    """A rule that the user registered for a primitive of the step: the primitive's name, and a digest of the rule."""

    name: str
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """One collective operation of the step. `predicted_s` and `hidden_s` are those of one execution.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or `collective-permute`.
        axes: the mesh axes whose devices take part.
        bytes: what one device holds on the larger side: the operand of an all-reduce, all-to-all or permute, the input of a
            reduce-scatter, the output of an all-gather.
        count: times per step.
        operand: type and shape of the value, such as `float32[64,256]`.
        source: the line of the user's program that it comes from.
        predicted_s: seconds that it takes.
        overlap: the kind that says how much of it hides behind compute: `data_parallel`, `zero3`, `tensor`, `expert`, or `within`
            for one that is a part of an operation and runs beside its own work.
        scope: the leaf that it moves, if it is an input's or an output's, or else the module that it comes from, such as
            `block_3/ffn/up`; empty if the program names none.
        hidden_s: seconds that hide behind compute, less those by which they slow it.
        algorithm: the one that the prediction takes, the cheapest of the cluster's for these bytes.
        link: the slowest link that it crosses.
        is_transposed: whether compilers copy what goes into it, or comes out, into another order; `predicted_s` has the copy.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: float
    operand: str
    source: str
    predicted_s: float
    overlap: str = "expert"
    scope: str = ""
    hidden_s: float = 0.0
    algorithm: str = ""
    link: str = ""
    is_transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveTensor:
    """One of the values alive at the predicted memory peak; `scope`: the module that makes it, empty if none is named."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_device: int
    scope: str = ""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A logical mesh that was compared.

    Attributes:
        mesh_shape: sizes of its axes.
        step_s: predicted seconds per step of its best plan; None if the search of this mesh ended without a plan.
        at_least_s: where it ended without one, seconds that no plan on this mesh can beat; None if none fits the memory.
    """

    mesh_shape: tuple[int, ...]
    step_s: float | None
    at_least_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
    """A way to run the step that was compared.

    If no seconds are given, the way is impossible, for the reason in `obstacle`.

    Attributes:
        num_stages: pipeline stages, virtual ones counted; 1 is one mesh, None that they were not chosen.
        num_microbatches: parts of the batch.
        schedule: of a pipeline; empty for one mesh.
        virtual_stages: stages on each mesh.
        recompute: whether the backward pass repeats forward work.
        recomputed_layers: of how many layers, the first ones; None: of all.
        keeps_named: whether it keeps values that `jax.ad_checkpoint.checkpoint_name` names.
        step_s: predicted seconds per step, if it was planned.
        estimate_s: estimated seconds per step, if it was not.
        at_least_s: seconds per step that it exceeds by that estimate, if it was given up before the best stages were known.
        peak_bytes: predicted peak memory of one device, if it was planned.
        obstacle: why it is impossible: `memory`, `constraints`, or `cut`, if the step cannot be cut so; empty if it is possible,
            or a plan was written before plans said so.
    """

    num_stages: int | None
    num_microbatches: int
    schedule: str = ""
    virtual_stages: int = 1
    recompute: bool = False
    recomputed_layers: int | None = None
    keeps_named: bool = False
    step_s: float | None = None
    estimate_s: float | None = None
    at_least_s: float | None = None
    peak_bytes: int | None = None
    obstacle: str = ""

    @staticmethod
    def obstacle_of(error: Exception) -> str:
        """The obstacle that an error of planning tells of."""
        if isinstance(error, OutOfMemoryError):
            return "memory"
        return "constraints" if isinstance(error, ConstraintError) else "cut"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Presented):
    """What was decided for a step on one mesh, and what that should cost.

    Attributes:
        fingerprint: tells the traced program that the plan is for.
        trail: two digits for each of its equations, by which another program is told where it differs.
        cluster: the name of the cluster whose figures the predictions use.
        cluster_figures: a digest of these figures.
        mesh_shape: sizes of the logical mesh's axes.
        axis_names: their names: `x`, `y`, ... unless the user named them.
        inputs: the layout of every input leaf.
        outputs: the layout of every output leaf.
        layouts: every layout that an operation takes or gives, once.
        strategies: every way in which an operation is done, once.
        equations: for each equation of the program the name of its strategy.
        rules: the rules of primitives of the step that the user registered.
        collectives: every collective, in program order; those within operations come last.
        compute_s: predicted seconds of compute per step, local changes of layout included.
        comm_s: predicted seconds of the collectives per step.
        hidden_s: how many of these seconds hide behind compute, less those by which they slow it.
        peak_bytes: predicted peak memory of one device.
        memory_limit_bytes: the limit that the plan keeps, per device; None if there is none.
        peak_tensors: the largest values at the peak, largest first.
        planning_s: seconds that planning took.
        lower_bound_s: under the cost model no plan of what was left open is faster: on any of the meshes, in any number of
            microbatches that was open, with recomputation or without, whatever the memory; and in stages, if these were open.
            0: no bound is known.
        allow_redundant_compute: whether devices may repeat contractions.
        candidates: the meshes that were compared.
        copy_span: a gathered copy that no equation has used for this many equations is dropped and gathered again; None keeps
            copies to their last use.
        num_microbatches: parts of the batch, one after the other.
        recompute: whether the backward pass repeats the layers' forward work.
        recomputed_layers: of how many layers, the first ones, whose results are kept for longest; None: of all that gain by it.
        keeps_named: whether it keeps values that `jax.ad_checkpoint.checkpoint_name` names.
        compared: the numbers of microbatches, and recomputation, if several were compared.
        unlimited_s: about what the best plan without the memory limit would take, as far as that was searched.
        ended_early: whether planning ended before everything was compared, as its time was over or it was stopped.
        not_compared: what it left out then, in words.
        memory_bytes: predicted bytes of one device over the step, the most of each of equal stretches of operations; () if not
            known.
        flops: operations of the step's contractions and convolutions, on all devices together, each counted once; 0: not known.
        at_peak_s: seconds per step that these would take at the devices' peak.
        one_mesh_bound_s: where stages were open, the bound of plans on one mesh alone, not below `lower_bound_s`; else 0.
        first_device: the place of its first device among the step's; the others follow.
        node_kind: the kind of node that it runs on in a mixed cluster, whose other nodes idle; empty: on all devices.
        assumed_finite: products in loops and branches, each with its line, that take terms of a sum over microbatches, as
            `mul at model.py:12`. Their other factor is not known to be finite; where it is not, a result may be NaN in place of
            an infinity.
        compiler: whose buffers the memory is that of, XLA's for `cpu` or for `gpu`; the latter also stands for TPUs.
        version: of the JSON form.
    """

    fingerprint: str
    trail: str
    cluster: str
    cluster_figures: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    inputs: tuple[ValuePlan, ...]
    outputs: tuple[ValuePlan, ...]
    layouts: tuple[NamedLayout, ...]
    strategies: tuple[NamedStrategy, ...]
    equations: tuple[str, ...]
    rules: tuple[RegisteredRule, ...]
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
    recomputed_layers: int | None = None
    keeps_named: bool = False
    compared: tuple[Alternative, ...] = ()
    unlimited_s: float = 0.0
    ended_early: bool = False
    not_compared: tuple[str, ...] = ()
    hidden_s: float = 0.0
    one_mesh_bound_s: float = 0.0
    memory_bytes: tuple[int, ...] = ()
    flops: float = 0.0
    at_peak_s: float = 0.0
    first_device: int = 0
    node_kind: str = ""
    assumed_finite: tuple[str, ...] = ()
    compiler: str = "cpu"
    version: int = VERSION

    @property
    def step_s(self) -> float:
        """Predicted seconds per step: compute, and communication as far as it does not hide behind that."""
        return self.compute_s + self.comm_s - self.hidden_s

    @property
    def is_optimal(self) -> bool:
        """Whether it is proven that no plan of what was left open is faster, under the cost model."""
        return self.step_s <= self.lower_bound_s * (1 + 1e-6) + 1e-12

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh_shape)

    def devices_by_kind(self) -> dict[str, int]:
        """How many devices of each kind of node it uses; where nodes are alike, or counted as alike, their kind is empty."""
        return {self.node_kind: self.num_devices}

    def input(self, path: str) -> ValuePlan:
        """The input leaf with this `path`; PlanError names the nearest paths if there is none."""
        return _find(self.inputs, path)

    def output(self, path: str) -> ValuePlan:
        """The output leaf with this `path`; PlanError names the nearest paths if there is none."""
        return _find(self.outputs, path)

    def partition_specs(self) -> Mapping[str, PartitionSpec]:
        """PartitionSpec of every input leaf, by path."""
        return {value.path: value.partition_spec for value in self.inputs}

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back to an equal plan."""
        return text_of({"version": self.version, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from the text that `to_json` wrote.

        Raises:
            PlanError: the text is not such a plan, or one of another version.
        """
        fields = load_plan(text)
        if is_pipeline(fields):
            raise PlanError("the plan of a pipeline; PipelinePlan.from_json, or autopar.plan_from_json, reads it")
        return build(cls, fields)


def _find(values: tuple[ValuePlan, ...], path: str) -> ValuePlan:
    for value in values:
        if value.path == path:
            return value
    raise no_leaf(path, [value.path for value in values])


def no_leaf(path: str, paths: Sequence[str]) -> PlanError:
    """The error of a path that is none of the leaves': it names the nearest, of each argument one at least, or all of a few."""
    near = sorted(paths, key=lambda one: -_likeness(path, one))
    if len(near) <= _NAMED:
        return PlanError(f"no leaf {path!r}; there are {', '.join(near)}")
    firsts = {one.split("/")[0]: one for one in reversed(near)}
    others = [one for one in near if one not in firsts.values()]
    chosen = {*firsts.values(), *others[: max(0, _NAMED - len(firsts))]}
    named = [one for one in near if one in chosen][:_NAMED]
    return PlanError(
        f"no leaf {path!r}; the nearest of {len(near)} are {', '.join(named)}; `plan.show(full=True)` and "
        "`autopar explain ... --full` list all"
    )


def _likeness(path: str, other: str) -> float:
    """How alike two paths are; most if the name at the end is the same."""
    same_name = path.rsplit("/", 1)[-1] == other.rsplit("/", 1)[-1]
    return difflib.SequenceMatcher(None, path, other).ratio() + same_name
