"""A step in stages that follows another one in stages: every leaf stays where the leader keeps it, in the same layout.

In: the leader's plan and the step that follows. Out: a `Following`: the leaves' homes and layouts and the layers at which scans
are divided; and `place_by_leaves`, the stage of each forward equation of the follower:

    stage(e) = the highest of the stages of the equations that make its operands and the home of the largest leaf that it reads

So values go up the stages only, and no leaf is lent to another stage unless the leader lends it too, or the follower uses
leaves in another order. What can go wrong: a stage none of whose leaves the follower uses; it gets one operation of another
stage, with the leaves that this needs. Leaves are known by their paths, and a follower without one of the leader's is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from autopar.avals import bytes_of
from autopar.compat import Var
from autopar.errors import ArgumentError
from autopar.layouts.constraints import Rule
from autopar.layouts.mesh import LogicalMesh
from autopar.layouts.pieces import read_piece, whole_path
from autopar.microbatches.loop import TimeLoop
from autopar.pipeline_plan import PipelinePlan
from autopar.program.program import Equation, operands_of
from autopar.program.step import TracedStep
from autopar.stages.dependence import Dependence
from autopar.stages.scan_stacks import ScanCuts, find_stacks


@dataclasses.dataclass(frozen=True)
class Following:
    """What a step takes over from the plan of another one: by path, the stage of each leaf; per stage, layouts and the mesh."""

    homes: Mapping[str, int]
    layouts: tuple[tuple[Rule, ...], ...]
    meshes: tuple[LogicalMesh, ...]
    virtual_stages: int

    @classmethod
    def of(cls, plan: PipelinePlan) -> Following:
        """Of the leader's plan."""
        num_meshes = plan.num_stages // plan.virtual_stages
        meshes = tuple(LogicalMesh(s.plan.mesh_shape, s.plan.axis_names) for s in plan.stages[:num_meshes])
        layouts = tuple(
            tuple(
                Rule(glob=_literally(v.path), layout=v.partition_spec, must_match=False)
                for v in stage.plan.inputs
                if v.role == "state" and v.path in stage.leaves
            )
            for stage in plan.stages
        )
        return cls(homes_of(plan), layouts, meshes, plan.virtual_stages)

    def check(self, traced: TracedStep) -> None:
        """Raise ArgumentError if the step has no leaf of the leader's."""
        known = {whole_path(path) for path in self.homes}
        if not any(leaf.path in known for leaf in traced.inputs):
            own = [leaf.path for leaf in traced.inputs if leaf.role not in ("batch", "const")]
            raise ArgumentError(
                f"follow=: the step has no leaf of the one that it follows. That one keeps {_some(sorted(known))}; this one "
                f"takes {_some(own)}. Leaves are known by their paths: name the arguments alike, and nest them alike."
            )

    def scan_cuts(self, traced: TracedStep) -> ScanCuts:
        """The layers at which the step's stacks are divided so that their leaves lie as the leader's do."""
        starts: dict[str, set[int]] = {}
        for path in self.homes:
            if piece := read_piece(path):
                starts.setdefault(piece.whole, set()).add(piece.start)
        cuts = []
        for stack in find_stacks(traced):
            layers: set[int] = set()
            for v, leaf in zip(traced.program.invars, traced.inputs, strict=True):
                if v in stack.dims:
                    size = leaf.shape[stack.dims[v]]
                    layers |= {start * stack.length // size for start in starts.get(leaf.path, ()) if start}
            cuts.append(tuple(sorted(layers)))
        return tuple(cuts)


def homes_of(plan: PipelinePlan) -> dict[str, int]:
    """The stage of every leaf of a plan, by path."""
    return {path: stage.stage for stage in plan.stages for path in stage.leaves}


def leaves_at(homes: Mapping[str, int], loop: TimeLoop) -> dict[Var, int]:
    """The stage of a step's leaves, for those whose paths have one."""
    pairs = zip(loop.program.invars, loop.traced.inputs, strict=True)
    return {v: homes[leaf.path] for v, leaf in pairs if leaf.path in homes and leaf.role not in ("batch", "const")}


def place_by_leaves(loop: TimeLoop, homes: Mapping[Var, int], num_stages: int) -> tuple[int, ...]:
    """The stage of each equation of the forward chain; see the module's text. Raises ArgumentError if there are too few."""
    kinds = Dependence.of(loop)
    chain = kinds.forward()
    if len(chain) < num_stages:
        raise ArgumentError(
            f"follow=: the step has {len(chain)} forward operations, too few for the {num_stages} stages that it follows"
        )
    read = _leaves_read(kinds, homes)
    stage_of: dict[Var, int] = {}
    stages = []
    for eqn in chain:
        largest = max(read[eqn], key=lambda v: (bytes_of(v), -homes[v]), default=None)
        stage = max((stage_of.get(v, 0) for v in operands_of(eqn)), default=0)
        stage = stage if largest is None else max(stage, homes[largest])
        stage_of.update((v, stage) for v in eqn.outvars)
        stages.append(stage)
    for stage in range(num_stages):
        if stage not in stages:
            _fill(stage, stages, chain, read)
    return tuple(stages)


def _leaves_read(kinds: Dependence, homes: Mapping[Var, int]) -> dict[Equation, frozenset[Var]]:
    """The leaves with a home that each forward equation reads, directly or through what is computed anywhere."""
    origins: dict[Var, frozenset[Var]] = {v: frozenset({v}) for v in homes}
    read: dict[Equation, frozenset[Var]] = {}
    for eqn in (*kinds.prologue, *kinds.body):
        read[eqn] = frozenset().union(*(origins.get(v, frozenset()) for v in operands_of(eqn)))
        if not kinds.is_anchored(eqn):
            origins.update((v, read[eqn]) for v in eqn.outvars)
    return read


def _fill(stage: int, stages: list[int], chain: Sequence[Equation], read: Mapping[Equation, frozenset[Var]]) -> None:
    """Give a stage without work an equation of another: of those that can run there, one that needs few bytes of leaves."""
    made = {v: i for i, eqn in enumerate(chain) for v in eqn.outvars}
    makers = [[made[v] for v in operands_of(eqn) if v in made] for eqn in chain]
    users: list[list[int]] = [[] for _ in chain]
    for i, found in enumerate(makers):
        for maker in found:
            users[maker].append(i)
    possible = [
        i
        for i in range(len(chain))
        if stages.count(stages[i]) > 1
        and all(stages[k] <= stage for k in makers[i])
        and all(stages[k] >= stage for k in users[i])
    ]
    if not possible:
        raise ArgumentError(
            f"follow=: the step has nothing to do on stage {stage} of the {max(stages) + 1} that it follows"
        )
    best = min(possible, key=lambda i: sum(map(bytes_of, read[chain[i]])))
    stages[best] = stage


def _literally(path: str) -> str:
    """A glob that matches this path alone; those of pieces have brackets."""
    return re.sub(r"([\[*?])", r"[\1]", path)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(itertools.islice(paths, 3)) + (", ..." if len(paths) > 3 else "")
