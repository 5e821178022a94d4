"""`diff`: what differs between two saved plans, and what that costs.

In: two plans as `plan -o` writes them, of one mesh or of stages. Out: the decisions, the predictions, the layouts of leaves and
the collectives that differ. What can go wrong: the plans are for different programs; that is said first, and the leaves that both
have are compared all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from autopar.commands.plans.plan import read_plan
from autopar.commands.terminal.printing import new_table, print_json
from autopar.explain import standard_output
from autopar.explain.figures import figures_of, seconds_of
from autopar.explain.paths import layout_text, path_patterns
from autopar.explain.units import bytes_text, seconds_text
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import CollectivePlan, Plan, ValuePlan
from autopar.why.added import added_text, additions

_MOST_ROWS = 20
"""So many leaves, and so many collectives, are listed unless all are asked for."""
_SAME = 1e-9
_PIECE = re.compile(r"\[\d+:\d+\]$")
"""The end of the path of a piece of a leaf."""
_OF_NO_MODULE = "\n"
"""Part of no name: what is added is not asked of a module."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A difference between two plans: its name, and its value in either plan as text; empty if a plan has none.

    `difference` is how much more or less it is in the second, of what is a number in both.
    """

    name: str
    before: str
    after: str
    difference: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs between two plans.

    Attributes:
        same_program: whether both are for the same program.
        programs: that they are not, in words, and whether it may be one step that is cut differently; empty if they are.
        decisions: meshes, stages, microbatches and the like.
        predictions: seconds and bytes, of either plan also where they agree, as the reports of the plans have them.
        leaves: leaves whose layout, or whose stages, differ.
        collectives: seconds per step and bytes by kind and axes, where they differ.
        costs: what the step of the second takes more or less, in words.
    """

    same_program: bool
    programs: str
    decisions: tuple[Change, ...]
    predictions: tuple[Change, ...]
    leaves: tuple[Change, ...]
    collectives: tuple[Change, ...]
    costs: str


def diff(options: argparse.Namespace) -> int:
    """Run `diff`; 0, whatever differs."""
    found = compare(read_plan(options.before), read_plan(options.after))
    if options.json:
        print_json(dataclasses.asdict(found))
    else:
        _print(standard_output(), found, options)
    return 0


def compare(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Difference:
    """Compare two plans."""
    return Difference(
        same_program=before.fingerprint == after.fingerprint,
        programs=_programs_text(before, after),
        decisions=tuple(_changes(_decisions(before), _decisions(after))),
        predictions=tuple(_figure_changes(before, after)),
        leaves=tuple(_changes(_leaves(before), _leaves(after))),
        collectives=tuple(_collective_changes(before, after)),
        costs=_costs_text(before, after),
    )


def _programs_text(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> str:
    """That two plans are for different programs, if they are.

    On one mesh a plan's program has the loop over microbatches and the work that is done again, so that of one step there are
    several. What they hold of the step itself are its leaves.
    """
    if before.fingerprint == after.fingerprint:
        return ""
    if _cut(before) == _cut(after) or not _have_the_same_leaves(before, after):
        return "The plans are for different programs."
    return (
        f"The plans are for different programs, or for one step that is cut differently: {_cut_text(before)} in the first plan, "
        f"{_cut_text(after)} in the second."
    )


def _cut(plan: Plan | PipelinePlan) -> tuple[object, ...]:
    """What the program of a plan has beside the step; that of stages has nothing."""
    if isinstance(plan, PipelinePlan):
        return (1, False, None, False)
    return (plan.num_microbatches, plan.recompute, plan.recomputed_layers, plan.keeps_named)


def _cut_text(plan: Plan | PipelinePlan) -> str:
    stages = f"{plan.num_stages} stages with " if isinstance(plan, PipelinePlan) else ""
    parts = f"{plan.num_microbatches} microbatch{'es' * (plan.num_microbatches != 1)}"
    layers = plan.recomputed_layers if isinstance(plan, Plan) else None
    of_layers = "" if layers is None else f" of {layers} layer{'s' * (layers != 1)}"
    return f"{stages}{parts}{f' with recomputation{of_layers}' if plan.recompute else ''}"


def _have_the_same_leaves(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> bool:
    """Whether state and batch are alike: the same paths and types, and the same shapes where stages hold no pieces of them."""
    old, new = _shapes(before), _shapes(after)
    names = [{(_PIECE.sub("", path), dtype) for path, (dtype, _) in shapes.items()} for shapes in (old, new)]
    return names[0] == names[1] and all(old[path] == new[path] for path in old.keys() & new.keys())


def _shapes(plan: Plan | PipelinePlan) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each leaf of the state and the batch, by path."""
    inputs = [value for _, part in _stage_plans(plan) for value in part.inputs if not value.from_forward]
    return {value.path: (value.dtype, value.shape) for value in inputs if value.role in ("state", "batch")}


def _changes(before: dict[str, str], after: dict[str, str]) -> Iterator[Change]:
    for name in {**before, **after}:
        old, new = before.get(name, ""), after.get(name, "")
        if old != new:
            yield Change(name, old, new)


def _figure_changes(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Iterator[Change]:
    """What either should cost, figure by figure, and the differences."""
    old, new = figures_of(before), figures_of(after)
    seconds = {
        "step": (old.step_s, new.step_s),
        "compute": (old.compute_s, new.compute_s),
        "communication": (old.comm_s, new.comm_s),
        "hidden behind compute": (old.hidden_s, new.hidden_s),
    }
    for name, (a, b) in seconds.items():
        yield Change(name, seconds_text(a), seconds_text(b), _more_text(a, b, seconds_text))
    a, b = old.peak_bytes, new.peak_bytes
    yield Change("peak memory per device", bytes_text(a), bytes_text(b), _more_text(a, b, bytes_text))
    bubbles = [f"{plan.bubble:.1%}" if isinstance(plan, PipelinePlan) else "" for plan in (before, after)]
    if any(bubbles):
        yield Change("bubble", *bubbles)


def _more_text(before: float, after: float, text: Callable[[float], str]) -> str:
    """How much more or less it is after than before, and the share."""
    if abs(after - before) <= _SAME * abs(before):
        return "the same"
    share = f" ({abs(after - before) / before:.1%})" if before else ""
    return f"{text(abs(after - before))}{share} {'more' if after > before else 'less'}"


def _costs_text(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> str:
    """What the second plan's step takes more or less than the first's, and of two of a kind for what."""
    step = _more_text(before.step_s, after.step_s, seconds_text)
    if step == "the same":
        return "The second plan's step takes as long."
    is_one_kind = isinstance(before, Plan) == isinstance(after, Plan) and before.fingerprint == after.fingerprint
    why = f": it {added_text(additions(before, after, _OF_NO_MODULE))}" if is_one_kind else ""
    return f"The second plan's step takes {step}{why}."


def _stage_plans(plan: Plan | PipelinePlan) -> list[tuple[str, Plan]]:
    """The plans of one mesh, each with the name of its stage; one mesh has none."""
    if isinstance(plan, Plan):
        return [("", plan)]
    return [(f"stage {stage.stage}", stage.plan) for stage in plan.stages]


def _decisions(plan: Plan | PipelinePlan) -> dict[str, str]:
    """What was decided, by name."""
    limit = plan.memory_limit_bytes
    decided = {
        "cluster": plan.cluster,
        "devices": str(_count_devices(plan)),
        "memory limit": bytes_text(limit) if limit else "none",
        "stages": str(len(_stage_plans(plan))),
        "microbatches": str(plan.num_microbatches),
        "recompute": "yes" if plan.recompute else "no",
    }
    if isinstance(plan, PipelinePlan):
        decided |= {"schedule": plan.schedule, "virtual stages": str(plan.virtual_stages), "cuts": _words(plan.cuts)}
    return decided | {"mesh": "; ".join(_mesh_texts(plan))}


def _mesh_texts(plan: Plan | PipelinePlan) -> Iterator[str]:
    """Yield the logical meshes; of stages in a row that have the same one, once."""
    for mesh, group in itertools.groupby(_stage_plans(plan), key=lambda pair: _mesh_text(pair[1])):
        names = [name for name, _ in group]
        yield f"{mesh} in {_stage_names(names)}" if names[0] else mesh


def _stage_names(names: Sequence[str]) -> str:
    """Stages in a row as words: stage 3, or stages 3 to 7."""
    if len(names) == 1:
        return names[0]
    first, last = (name.removeprefix("stage ") for name in (names[0], names[-1]))
    return f"stages {first} to {last}"


def _mesh_text(plan: Plan) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(plan.axis_names, plan.mesh_shape, strict=True))


def _count_devices(plan: Plan | PipelinePlan) -> int:
    if isinstance(plan, Plan):
        return math.prod(plan.mesh_shape)
    meshes = {stage.mesh: math.prod(stage.plan.mesh_shape) for stage in plan.stages}
    return sum(meshes.values())


def _leaves(plan: Plan | PipelinePlan) -> dict[str, str]:
    """The layouts of the step's state and batch, by path; with their stages where there are several."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, part in _stage_plans(plan):
        for value in part.inputs:
            if not value.from_forward and value.role in ("state", "batch"):
                found[value.path].append(f"{_layout_text(value)}{f' in {name}' if name else ''}")
    return {path: "; ".join(dict.fromkeys(layouts)) for path, layouts in found.items()}


def _layout_text(value: ValuePlan) -> str:
    return f"{layout_text(value.spec)}, {bytes_text(value.bytes_per_device)}"


def _collective_changes(before: Plan | PipelinePlan, after: Plan | PipelinePlan) -> Iterator[Change]:
    """Seconds, bytes and times per step by kind and axes, and by stage, where they differ."""
    old, new = _collectives(before), _collectives(after)
    for name in {**old, **new}:
        ones, others = old.get(name, []), new.get(name, [])
        texts = _collectives_text(ones), _collectives_text(others)
        if texts[0] != texts[1]:
            yield Change(name, *texts, _more_text(seconds_of(ones)[0], seconds_of(others)[0], seconds_text))


def _collectives(plan: Plan | PipelinePlan) -> dict[str, list[CollectivePlan]]:
    groups: dict[str, list[CollectivePlan]] = defaultdict(list)
    for name, part in _stage_plans(plan):
        for one in part.collectives:
            groups[f"{one.kind} over {_words(one.axes)}{f' in {name}' if name else ''}"].append(one)
    return groups


def _collectives_text(ones: Sequence[CollectivePlan]) -> str:
    if not ones:
        return ""
    count, size = sum(one.count for one in ones), sum(one.count * one.bytes for one in ones)
    times = f"{count:,.0f} time{'s' * (count != 1)}"
    return f"{seconds_text(seconds_of(ones)[0])}, {bytes_text(size)}, {times}"


def _words(things: Sequence[object]) -> str:
    return ", ".join(map(str, things))


def _join_alike(changes: Sequence[Change]) -> list[Change]:
    """Leaves that change alike as one, with a pattern of their paths for a name."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for change in changes:
        alike[change.before, change.after].append(change.name)
    return [Change(str(pattern), *key) for key, paths in alike.items() for pattern in path_patterns(paths)]


def _print(console: Console, found: Difference, options: argparse.Namespace) -> None:
    before, after = str(options.before), str(options.after)
    if found.programs:
        console.print(f"{found.programs}\n", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{found.costs}\n", markup=False, highlight=False, soft_wrap=True)
    sections = (
        ("Decisions", found.decisions),
        ("Predictions", found.predictions),
        ("Leaves", found.leaves if options.full else _join_alike(found.leaves)),
        ("Collectives: seconds, bytes, times", found.collectives),
    )
    for title, changes in sections:
        if not changes:
            continue
        columns = [before, after, *(["difference"] if any(change.difference for change in changes) else [])]
        table = new_table(title, "", *columns, words=("", *columns))
        listed = len(changes) if options.full else _MOST_ROWS
        for change in changes[:listed]:
            cells = (change.name, change.before or "-", change.after or "-", change.difference)
            table.add_row(*map(Text, cells[: 1 + len(columns)]))
        if len(changes) > listed:
            table.add_row(f"... {len(changes) - listed} more, see --full")
        console.print(table)
        console.print()
    if not (found.decisions or found.leaves or found.collectives):
        console.print("The plans decide the same.", markup=False)
