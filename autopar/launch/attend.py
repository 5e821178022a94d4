"""Attend a worker's script: report what it is doing, cause faults on purpose, and watch its steps.

In: the environment, and the moments of `autopar.events`. Out: the words of the beats; the `Monitor` if one was asked for. JAX is
not imported before the script imports it, because the script may set JAX's environment first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from autopar.events import Moment, observing
from autopar.launch.environment import FAULTS, METRICS, STALL
from autopar.launch.line import Line
from autopar.testing.faults import inject

OF_STEPS = ("phase", "step", "waiting")
"""Kinds of moments before which a script has imported JAX."""


@contextlib.contextmanager
def attending(line: Line) -> Iterator[None]:
    """Open a context around a worker's script."""
    faults = list(filter(None, os.environ.get(FAULTS, "").split("\n")))
    with contextlib.ExitStack() as stack:
        stack.enter_context(observing(_Attendant(line, stack)))
        if faults:
            stack.enter_context(inject(*faults))
        yield


class _Attendant:
    """Observes every moment of the script."""

    def __init__(self, line: Line, stack: contextlib.ExitStack) -> None:
        self._line, self._stack = line, stack
        self._is_watched = not (STALL in os.environ or METRICS in os.environ)

    def __call__(self, moment: Moment) -> None:
        if not self._is_watched and moment.kind in OF_STEPS:
            self._is_watched = True
            self._watch(moment)
        match moment.kind:
            case "phase":
                self._line.doing = f"{moment.name} a step"
            case "step":
                self._line.doing = f"runs {moment.name}, its step {self._line.steps + 1}"
            case "launched":
                self._line.steps += 1
            case "waiting":
                self._line.doing = f"waits for {moment.name}"

    def _watch(self, first: Moment) -> None:
        """Open a monitor, which hears of the moment before which it was opened, too."""
        from autopar.monitor.monitor import Monitor

        stall = os.environ.get(STALL)
        monitor = self._stack.enter_context(
            Monitor(
                stall_s=None if stall is None else float(stall),
                on_stall=lambda words: self._line.say("stalled" if words else "going on", words),
                metrics=os.environ.get(METRICS),
            )
        )
        monitor.observe(first)
