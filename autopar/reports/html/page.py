"""The page itself: the sections of a plan in a template.

In: a plan. Out: HTML. What can go wrong: the packages of the extra `report` are missing; ArgumentError says how to get them.
"""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import ArgumentError
from autopar.explain.report import header
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

if TYPE_CHECKING:
    from autopar.reports.html.contents import Section

TEMPLATE = Path(__file__).with_name("page.html.j2")
_PACKAGES = ("jinja2", "matplotlib")


def is_available() -> bool:
    """Whether the packages that draw the page are installed."""
    return all(importlib.util.find_spec(name) for name in _PACKAGES)


def require_packages() -> None:
    """Raise ArgumentError if the packages that draw the page are missing."""
    if not is_available():
        raise ArgumentError(f"the report as HTML needs {' and '.join(_PACKAGES)}: pip install 'autopar[report]'")


def page(plan: Plan | PipelinePlan, first: Sequence[Section] = ()) -> str:
    """The page of a plan, behind other sections. Raises ArgumentError if the packages that draw it are missing."""
    require_packages()
    import jinja2

    from autopar.reports.html.contents import key_figures, sections

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    title, *rest = header(plan).splitlines()
    return template.render(
        title=title, lines=rest, figures=key_figures(plan), sections=[*first, *sections(plan)], plan=plan
    )


def notebook(plan: Plan | PipelinePlan) -> str | None:
    """The page in a frame of its own, for notebooks; None if it cannot be drawn."""
    if not is_available():
        return None
    return f'<iframe srcdoc="{html.escape(page(plan))}" style="width:100%;height:640px;border:0"></iframe>'
