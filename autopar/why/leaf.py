"""Why a leaf has its layout: what each other one would cost, and what decides.

In: a question and the path of a leaf. Out: `LeafAnswer`. Each price is that of the best plan in which the leaf has that
layout, so it is what `constraints={path: layout}` gives. What decides is a rule of the user's, or what the nearest layout
would add: collectives, by the module that asks for them, and compute. What can go wrong: more layouts than there is time to
try; the nearest are tried, and the answer says how many are left.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
from collections.abc import Sequence

from autopar.explain.paths import layout_text
from autopar.explain.strategies import PARAMETER_WORDS
from autopar.explain.units import seconds_text
from autopar.layouts.constraints import Rule
from autopar.layouts.mesh import LogicalMesh
from autopar.layouts.moves import all_layouts
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan, Spec, ValuePlan
from autopar.progress import begin_search
from autopar.why.added import SAME, Added, added_text, additions, not_waited_for
from autopar.why.question import Question

MOST_TRIED = 12
"""Layouts of a leaf that are tried; each is a search."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutPrice:
    """A layout that a leaf could have.

    Attributes:
        spec: the layout.
        step_s: predicted seconds per step of the best plan in which the leaf has it; None if there is none.
        peak_bytes: that plan's peak memory per device.
        adds: what the step then does more than in the plan, the leaf's own module first, and what it saves; they add up to the
            difference of the steps.
        moves: leaves that have another layout then, too.
        problem: why there is no such plan; empty if there is one.
    """

    spec: Spec
    step_s: float | None
    peak_bytes: int | None
    adds: tuple[Added, ...] = ()
    moves: tuple[str, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafAnswer:
    """Why a leaf has its layout.

    Attributes:
        leaf: the leaf as the plan has it.
        step_s: predicted seconds per step of the plan.
        peak_bytes: its peak memory per device.
        others: the other layouts, the cheapest first, then those without a plan.
        not_tried: how many more there are.
        decides: what decides, in words.
    """

    leaf: ValuePlan
    step_s: float
    peak_bytes: int
    others: tuple[LayoutPrice, ...]
    not_tried: int
    decides: str


def why_leaf(question: Question, path: str) -> LeafAnswer:
    """Why a leaf has its layout. Raises PlanError if there is no such leaf."""
    plan, leaf = question.plan, question.plan.input(path)
    mesh = _mesh_of(plan, leaf)
    specs = [layout.spec(mesh) for layout in all_layouts(leaf.shape, mesh, ())]
    open_ = sorted(
        (spec for spec in dict.fromkeys(specs) if spec != leaf.spec), key=lambda spec: _distance(spec, leaf.spec)
    )
    found = []
    for number, spec in enumerate(open_[:MOST_TRIED], 1):
        begin_search(f"layout {layout_text(spec)}, {number} of {min(len(open_), MOST_TRIED)}")
        found.append(_price(question, leaf, spec))
    others = sorted(found, key=lambda one: (one.step_s is None, one.step_s or 0.0))
    return LeafAnswer(
        leaf=leaf,
        step_s=plan.step_s,
        peak_bytes=plan.peak_bytes,
        others=tuple(others),
        not_tried=len(open_) - len(found),
        decides=_what_decides(question, leaf, others),
    )


def rule_for(leaf: ValuePlan, spec: Spec) -> Rule:
    """The constraint that gives a leaf this layout."""
    layout = dataclasses.replace(leaf, spec=spec).partition_spec
    return Rule(glob=glob.escape(leaf.path), layout=layout)


def _price(question: Question, leaf: ValuePlan, spec: Spec) -> LayoutPrice:
    forced = question.under(rule_for(leaf, spec))
    if isinstance(forced, str):
        return LayoutPrice(spec=spec, step_s=None, peak_bytes=None, problem=forced)
    before = {value.path: value.spec for value in _inputs(question.plan)}
    moved = [v.path for v in _inputs(forced) if v.path != leaf.path and before.get(v.path, v.spec) != v.spec]
    return LayoutPrice(
        spec=spec,
        step_s=forced.step_s,
        peak_bytes=forced.peak_bytes,
        adds=additions(question.plan, forced, _module_of(leaf)),
        moves=tuple(dict.fromkeys(moved)),
    )


def _module_of(leaf: ValuePlan) -> str:
    """The module that a parameter belongs to, as name stacks write it: what stands between the parameters and its own name."""
    names = leaf.path.split("/")
    first = next((number for number, name in enumerate(names) if name in PARAMETER_WORDS), 0)
    return "/".join(names[first + 1 : -1]) or leaf.path


def _what_decides(question: Question, leaf: ValuePlan, others: Sequence[LayoutPrice]) -> str:
    rule = next((one for one in reversed(question.settings.constraints.rules) if _names(one, leaf)), None)
    if rule is not None:
        return _price_of_rule(question, rule, leaf)
    nearest = next((one for one in others if one.step_s is not None), None)
    if nearest is None or nearest.step_s is None:
        return "no other layout has a plan" if others else "it has no other layout on this mesh"
    more_s, text = nearest.step_s - question.plan.step_s, layout_text(nearest.spec)
    if abs(more_s) <= SAME * question.plan.step_s:
        return f"nothing: {text} costs the same{_why_the_same(nearest)}"
    if more_s < 0:
        return _what_was_missed(question, leaf, nearest.spec, -more_s)
    what = f": it {added_text(nearest.adds)}" if nearest.adds else ""
    return f"the next best layout, {text}, costs {seconds_text(more_s)} more{what}"


def _what_was_missed(question: Question, leaf: ValuePlan, spec: Spec, less_s: float) -> str:
    """That a layout is faster than the one that the search has found, why that may be, and how to have it."""
    share = f"{seconds_text(less_s)} ({less_s / question.plan.step_s:.1%}) less"
    rule = rule_for(leaf, spec)
    pinned = f"constraints={{{rule.glob!r}: {rule.layout!r}}} pins it"
    reason = (
        "the clock ended the search before it found that"
        if question.plan.ended_early
        else ("the search leaves plans that are faster by less than its gap, which the plan states:")
    )
    return f"{reason} {layout_text(spec)} takes {share}; {pinned}"


def _why_the_same(other: LayoutPrice) -> str:
    """Why a layout costs nothing whose stage has other work: the step does not wait for that stage."""
    more_s = not_waited_for(other.adds)
    if not more_s:
        return ""
    change = f"{seconds_text(abs(more_s))} {'more' if more_s > 0 else 'less'}"
    return f"; the stages have {change} to do, beside the work of others for which the step waits"


def _price_of_rule(question: Question, rule: Rule, leaf: ValuePlan) -> str:
    name = f"the constraint on {rule.glob!r}{f' of {rule.asked_by}' if rule.asked_by else ''}"
    free = question.without(rule)
    if isinstance(free, str):
        return f"{name}; without it, the rest {free}"
    spec = next((value.spec for value in _inputs(free) if value.path == leaf.path), leaf.spec)
    saved_s = question.plan.step_s - free.step_s
    if saved_s <= SAME * question.plan.step_s:
        return f"{name}, which costs nothing"
    return f"{name}; without it the leaf is {layout_text(spec)} and the step takes {seconds_text(saved_s)} less"


def _names(rule: Rule, leaf: ValuePlan) -> bool:
    return rule.role in (None, leaf.role) and fnmatch.fnmatchcase(leaf.path, rule.glob)


def _mesh_of(plan: Plan | PipelinePlan, leaf: ValuePlan) -> LogicalMesh:
    """The mesh on which the leaf lies."""
    own = next(one for one in _plans(plan) if leaf in one.inputs)
    return LogicalMesh(own.mesh_shape, own.axis_names)


def _distance(spec: Spec, other: Spec) -> int:
    """How many axes lie otherwise in two layouts, and then the order of axes."""
    places = [{axis: number for number, axes in enumerate(one) for axis in axes} for one in (spec, other)]
    moved = sum(places[0].get(axis) != places[1].get(axis) for axis in {*places[0], *places[1]})
    return 2 * moved + (spec != other)


def _plans(plan: Plan | PipelinePlan) -> list[Plan]:
    return [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]


def _inputs(plan: Plan | PipelinePlan) -> list[ValuePlan]:
    return [value for one in _plans(plan) for value in one.inputs]
