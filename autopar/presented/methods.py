"""The methods by which a plan shows itself, for `Plan` and `PipelinePlan` to inherit.

In: a plan. Out: text on standard output, text, HTML. What can go wrong: `autopar.reports` imports plans, so it is loaded by name.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import ClassVar


class Presented:
    """A plan that can be printed, shown in full, written as a page, and asked."""

    _asked: ClassVar[tuple[object, object] | None] = None
    """The settings and the step that it was planned for; each plan may have its own. No part of its value."""

    is_cluster_assumed: ClassVar[bool] = False
    """Whether nobody said for which machine to plan, and there was none to look at. No part of its value either."""

    def know_question(self, settings: object, traced: object, *, is_cluster_assumed: bool) -> None:
        """Remember what the plan is the answer to, for `why`: `settings`, and the step as `traced`.

        `is_cluster_assumed`: whether the user named no cluster, so that a preset was taken.
        """
        object.__setattr__(self, "_asked", (settings, traced))
        object.__setattr__(self, "is_cluster_assumed", is_cluster_assumed)

    def __getstate__(self) -> dict[str, object]:
        """What copies and pickles hold: the plan without its question."""
        return {name: value for name, value in vars(self).items() if name not in ("_asked", "is_cluster_assumed")}

    def __repr__(self) -> str:
        """One line: where it runs and what it should cost."""
        return str(_reports().line(self))

    def __str__(self) -> str:
        """A page of at most 40 lines; `show` prints all."""
        return str(_reports().page(self))

    def show(
        self,
        *,
        full: bool = False,
        classic: bool = False,
        what_if: bool = False,
        recorded: object = None,
        verified: object = None,
    ) -> None:
        """Print the report, as `autopar plan` does.

        Args:
            full: each leaf, collective and stage has a row.
            classic: add what `classic()` returns, which plans five more times.
            what_if: add what `what_if()` returns, which plans two or three more times.
            recorded: a `RecordedRun` of the plan; what was measured is printed beside what is predicted.
            verified: a `Verification` of the compiled plan; its rows are printed last.
        """
        _reports().show(self, full=full)
        for asked, answer in ((classic, self.classic), (what_if, self.what_if)):
            if asked:
                _reports().say(f"\n{answer()}")
        if recorded is not None:
            _reports().say(f"\n{_reports().measured_text(self, recorded)}")
        if verified is not None:
            _reports().say(f"\n{verified}")

    def html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        classic: bool = False,
        what_if: bool = False,
        recorded: object = None,
        verified: object = None,
    ) -> str:
        """The report as one page of HTML that needs nothing else.

        Args:
            path: where it is written too.
            classic: add what `classic()` returns, which plans five more times.
            what_if: add what `what_if()` returns, which plans two or three more times.
            recorded: a `RecordedRun` of the plan, whose step is drawn beside the predicted one.
            verified: a `Verification` of the compiled plan, which has a section.

        Raises:
            ArgumentError: jinja2 or matplotlib is missing; `pip install 'autopar[report]'` brings them.
            PlanError: the plan is from a file, knows no step, and is asked for other plans.
        """
        asked = ((classic, self.classic), (what_if, self.what_if))
        answers = [answer() for is_asked, answer in asked if is_asked]
        return str(_reports().html(self, path, recorded=recorded, verified=verified, answers=answers))

    def why(self, path: str) -> object:
        """Why a leaf has its layout: what each other one would cost, and what decides. Print the answer.

        Each price is that of a plan, found under one more constraint on the same meshes: this searches as often as the leaf has
        other layouts.

        Args:
            path: of the leaf, such as `state/params/block_3/ffn/up/kernel`.

        Raises:
            PlanError: the plan has no such leaf, or is from a file and knows no step.
        """
        return importlib.import_module("autopar.why.report").why(self, self._asked, path)

    def classic(self) -> object:
        """The classic plans beside this one: data parallel, ZeRO-2, ZeRO-3, tensor parallel, a pipeline. Print the answer.

        Each is the best of its kind for the same step on as many devices, planned with the same limits: this searches five times.

        Raises:
            PlanError: the plan is from a file and knows no step.
        """
        return importlib.import_module("autopar.why.classic").classic(self, self._asked)

    def what_if(self) -> object:
        """What 1 GiB more memory, and twice the bandwidth of each kind of link, would buy. Print the answer.

        Each price is that of the best plan on the better machine: this searches once for each.

        Raises:
            PlanError: the plan is from a file and knows no step.
        """
        return importlib.import_module("autopar.why.what_if").what_if(self, self._asked)

    def _repr_html_(self) -> str | None:
        """The page, for notebooks; None without the packages that draw it, and the notebook shows the line."""
        page: str | None = _reports().notebook(self)
        return page


def _reports() -> ModuleType:
    return importlib.import_module("autopar.reports.report")
