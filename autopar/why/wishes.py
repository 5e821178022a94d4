"""What the user fixed and could leave open, each with its words.

In: settings. Out: `Wish`es: a preset, a constraint, or an argument that was given. What can go wrong: rules that a preset made;
they are one wish together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.intra_op.choices.options import PlannerOptions
from autopar.layouts.constraints import Constraints, Rule, SplitBatch
from autopar.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user fixed, in words; `field` of the settings is left open if it is given up, or `rules` left out."""

    words: str
    field: str = ""
    open_value: object = "auto"
    rules: tuple[Rule, ...] = ()

    def given_up(self, settings: Settings) -> Settings:
        """The settings without this wish."""
        if not self.rules:
            return dataclasses.replace(settings, **{self.field: self.open_value})  # type: ignore[arg-type]
        constraints = settings.constraints
        left = tuple(one for one in constraints.rules if not any(one is rule for rule in self.rules))
        return dataclasses.replace(settings, constraints=Constraints(left, constraints.without))


def wishes_of(settings: Settings) -> list[Wish]:
    """What the user fixed and could leave open; the rules of presets are one wish."""
    of_preset = [rule for rule in settings.constraints.rules if _is_of_preset(rule)]
    found = [Wish(words=_preset_text(of_preset), rules=tuple(of_preset))] if of_preset else []
    found += [
        Wish(words=_rule_text(rule), rules=(rule,)) for rule in settings.constraints.rules if not _is_of_preset(rule)
    ]
    arguments = (
        ("mesh_shape", "meshes"),
        ("num_stages", "num_stages"),
        ("num_microbatches", "num_microbatches"),
        ("virtual_stages", "virtual_stages"),
        ("recompute", "recompute"),
    )
    for argument, field in arguments:
        value = getattr(settings, field)
        if value != "auto":
            shown = [mesh.shape for mesh in value] if field == "meshes" else value
            found.append(Wish(words=f"{argument}={shown!r}", field=field))
    if settings.options.kinds != PlannerOptions().kinds:
        kinds = PlannerOptions(allow_redundant_compute=settings.options.allow_redundant_compute)
        found.append(Wish(words=f"collectives={sorted(settings.options.kinds)}", field="options", open_value=kinds))
    return found


def _is_of_preset(rule: Rule) -> bool:
    """Whether `data_parallel` or a `zero` made a rule: only they speak of roles."""
    return bool(rule.asked_by) or (rule.glob == "*" and rule.role is not None)


def _preset_text(rules: Sequence[Rule]) -> str:
    """The call that made the rules."""
    names = {rule.asked_by.partition("(")[0] for rule in rules if rule.asked_by}
    axes = next((rule.layout.axes for rule in rules if isinstance(rule.layout, SplitBatch) and rule.layout.axes), None)
    return f"{max(names, default='data_parallel')}({', '.join(map(repr, axes or ()))})"


def _rule_text(rule: Rule) -> str:
    of = f" of the {rule.role}" if rule.role and rule.glob == "*" else ""
    return f"the constraint {rule.glob!r}{of}: {rule.layout!r}"
