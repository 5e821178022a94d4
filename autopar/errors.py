"""The exceptions and the warning of autopar.

Every exception that autopar raises on purpose is an `AutoparError`. Its message gives the fact with its numbers, the reason, and
what to try. Warnings are `AutoparWarning`, shown at the user's own line.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence

_PASSED_OVER = ("autopar", "jax", "contextlib", "functools")
"""Packages whose lines a warning does not name. The user's line is the one that called them, perhaps through a decorator."""


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose."""


class ArgumentError(AutoparError, ValueError):
    """An argument of `parallelize`, of the step, or of the command line cannot be used as given."""


class ConstraintError(AutoparError, ValueError):
    """A layout that the user asked for does not exist or cannot be met."""


class OutOfMemoryError(AutoparError, MemoryError):
    """No plan fits the memory limit.

    Attributes:
        needed_bytes: the lowest limit, per device, that one of the plans that were tried would fit; None if none was tried.
        bound_bytes: the message tells of ways to run the step; none of these needs less, per device. None if that is not known.
        tensors: the largest that are alive together, in words.
        is_settled: whether no plan fits; else none was found, and the search ended before it had tried all that may.
        asked: the settings and the step that were asked for; None where nobody planned a whole step.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        bound_bytes: int | None = None,
        tensors: Sequence[str] = (),
        is_settled: bool = True,
    ) -> None:
        super().__init__(message)
        self.needed_bytes, self.bound_bytes = needed_bytes, bound_bytes
        self.tensors = tuple(tensors)
        self.is_settled = is_settled
        self.asked: tuple[object, object] | None = None

    def conflict(self, budget_s: float | None = None) -> object:
        """The smallest set of wishes that leave no plan within the memory, and what giving each up costs. Print the answer.

        Nothing is estimated: this plans the step again without one wish or the other, which takes as many searches. When the
        time is up, or after Ctrl-C, the answer says what was found until then, and what was not tried.

        Args:
            budget_s: seconds for all of it; None: as long as planning may take (`planning_seconds`), or a minute.

        Returns:
            What prints as the answer; `.answer` has it as data.

        Raises:
            PlanError: the error knows no step.
        """
        return importlib.import_module("autopar.why.report").why_not(self, budget_s)


class UnsupportedProgramError(AutoparError, TypeError):
    """The traced program does something that cannot be computed in parallel, such as a Python side effect."""


class RuleError(AutoparError, ValueError):
    """A factor rule is malformed or does not describe its equation."""


class PlanError(AutoparError, ValueError):
    """A plan does not belong to the program or the devices it is used with."""


class VerificationError(AutoparError, RuntimeError):
    """A compiled program does something else than its plan says."""


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule, or a list of instructions made from one, cannot be executed as it is."""


class PipelineError(AutoparError, RuntimeError):
    """A mesh failed while a step ran, and all meshes were stopped; the original exception is the `__cause__`."""


class CheckpointError(AutoparError, RuntimeError):
    """A checkpoint could not be written, or cannot be restored: it is incomplete, damaged, or of another state."""


class TrainingError(AutoparError, RuntimeError):
    """A training run cannot go on: the loss of a step is no number, or far above those before it."""


class AutoparWarning(UserWarning):
    """Something works, but not as well as it could; the message says how to improve it."""


_SAID: contextvars.ContextVar[tuple[list[str], ...]] = contextvars.ContextVar("said", default=())


@contextlib.contextmanager
def listening_to_warnings() -> Iterator[list[str]]:
    """A context that yields a list, to which every message of `warn` in this thread is added; warnings are issued as usual."""
    said: list[str] = []
    token = _SAID.set((*_SAID.get(), said))
    try:
        yield said
    finally:
        _SAID.reset(token)


def warn(message: str) -> None:
    """Issue an `AutoparWarning` at the user's line, however many frames of autopar and JAX lie between."""
    for said in _SAID.get():
        said.append(message)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, AutoparWarning, stacklevel=level)
