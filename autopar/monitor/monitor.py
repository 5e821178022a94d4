"""A `Monitor` watches the steps of this process while it is open.

In: the moments of `autopar.events`. Out: the `StepMetrics` of each call of a step, and for a call that stands still a description
of where each mesh is. The monitor's own thread waits for results and looks at what is under way, so that steps never wait for it.
What can go wrong: a callback for metrics raises. The monitor logs the exception, and calls the callback again for the next step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax

from autopar.errors import ArgumentError
from autopar.events import Moment, StepRun, observing
from autopar.monitor.metrics import JsonLines, Sink, StepMetrics, TensorBoard, measure
from autopar.monitor.stalls import StallWatch
from autopar.monitor.tuning import TUNING
from autopar.progress import LOGGER
from autopar.runtime.processes import is_ready


@dataclass(kw_only=True, eq=False)
class _Call:
    """A call of a step that is under way."""

    run: StepRun
    number: int
    began_s: float
    launched_s: float | None = None
    result: jax.Array | None = None


class Monitor:
    """Watches the steps of this process. Use it as a context around a training loop."""

    def __init__(
        self,
        *,
        stall_s: float | None = None,
        on_stall: Callable[[str], None] | None = None,
        on_step: Callable[[StepMetrics], None] | None = None,
        metrics: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        timeline_every: int | None = None,
    ) -> None:
        """Choose what to watch. The context starts it.

        Args:
            stall_s: seconds after which a step that stands still is described. The first call of a plan compiles, and has
                three times as long. None sets no limit.
            on_stall: called with the description of a stall, and with an empty text when the step goes on. The description is
                also logged as an error.
            on_step: called with the metrics of each call, in the monitor's thread.
            metrics: a file to which the metrics are appended as lines of JSON.
            tensorboard: a folder to which the metrics are written for TensorBoard; needs tensorboardX or PyTorch.
            timeline_every: measures one of this many calls of pipelines task by task. Such a call takes longer, and gives
                `StepMetrics.exposed_comm_s`. All processes need the same number. None measures none.

        Raises:
            ArgumentError: `stall_s` or `timeline_every` is not positive.
        """
        if stall_s is not None and stall_s <= 0:
            raise ArgumentError(
                f"stall_s={stall_s} is not above zero; give seconds, or None for steps that may take any time"
            )
        if timeline_every is not None and timeline_every < 1:
            raise ArgumentError(f"timeline_every={timeline_every} counts calls from 1; give a whole number, or None")
        self._timeline_every = timeline_every
        self._stalls = None if stall_s is None else StallWatch(stall_s)
        self._look_s = TUNING.look_s if stall_s is None else min(TUNING.look_s, stall_s / TUNING.looks)
        self._on_stall = on_stall
        self._on_step, self._metrics, self._tensorboard = on_step, metrics, tensorboard
        self._lock, self._stack = threading.Lock(), contextlib.ExitStack()
        self._clear()

    def _clear(self) -> None:
        """Forget the steps and files of an earlier context."""
        self._sinks: list[Sink] = [] if self._on_step is None else [self._on_step]
        self._calls: deque[_Call] = deque()
        self._is_new = False
        self._waiting = ""
        self._count, self._last_s = 0, 0.0
        self._wake, self._over = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        """Start to watch; calls count from 1 each time. Raises ArgumentError if a file cannot be opened."""
        self._clear()
        if self._metrics is not None:
            self._sinks.append(self._stack.enter_context(contextlib.closing(JsonLines(Path(self._metrics)))))
        if self._tensorboard is not None:
            self._sinks.append(self._stack.enter_context(contextlib.closing(TensorBoard(Path(self._tensorboard)))))
        thread = threading.Thread(target=self._work, args=(self._over,), name="autopar monitor", daemon=True)
        self._stack.callback(thread.join, TUNING.leave_s + 1)
        self._stack.callback(self._end)
        self._stack.enter_context(observing(self.observe))
        thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Wait a moment for the last results, and stop watching."""
        self._stack.close()
        self._clear()  # results that were not awaited would stay in memory

    def _end(self) -> None:
        self._over.set()
        self._wake.set()

    def observe(self, moment: Moment) -> None:
        """Note a moment of a step, in the thread in which it happens."""
        match moment.kind, moment.about:
            case "step", StepRun() as run:
                self._count += 1
                run.wants_timeline = self._timeline_every is not None and self._count % self._timeline_every == 0
                with self._lock:
                    self._calls.append(_Call(run=run, number=self._count, began_s=time.monotonic()))
            case "launched", StepRun() as run:
                for call in self._calls_of(run):
                    call.result = _witness(moment.values or ())
                    call.launched_s = time.monotonic()
                    self._is_new = False
            case "failed", StepRun() as run:
                for call in self._calls_of(run):
                    self._drop(call)
            case "waiting", words:
                self._waiting = f"waits for {words}"
            case "heard", _:
                self._waiting = ""
            case "phase", _:
                self._is_new = True
            case _:
                return
        self._wake.set()

    def _calls_of(self, run: StepRun) -> list[_Call]:
        """Return the calls of a `StepRun` that are under way."""
        with self._lock:
            return [call for call in self._calls if call.run is run]

    def _oldest(self) -> _Call | None:
        """Return the call that has been under way for longest."""
        with self._lock:
            return self._calls[0] if self._calls else None

    def _drop(self, call: _Call) -> None:
        """Note that a call is no longer under way."""
        with self._lock, contextlib.suppress(ValueError):  # it failed, and was dropped before
            self._calls.remove(call)

    def _work(self, over: threading.Event) -> None:
        """Run the monitor's thread: wait for results and look for stalls until the context is `over`."""
        ends_s = float("inf")
        while not (over.is_set() and (not self._calls or time.monotonic() > ends_s)):
            if over.is_set() and ends_s == float("inf"):
                ends_s = time.monotonic() + TUNING.leave_s
            call = self._oldest()
            if call is not None and call.launched_s is not None:
                if _wait(call.result, time.monotonic() + self._look_s):
                    self._complete(call, call.launched_s)
            else:
                self._wake.wait(self._look_s)
                self._wake.clear()
            self._look()

    def _complete(self, call: _Call, launched_s: float) -> None:
        """Measure a call and pass its metrics on."""
        now_s = time.monotonic()
        self._drop(call)
        found = measure(
            call.run,
            call=call.number,
            step_s=now_s - max(call.began_s, self._last_s),
            call_s=launched_s - call.began_s,
        )
        self._last_s = now_s
        for sink in self._sinks:
            try:
                sink(found)
            except Exception:  # noqa: BLE001 - metrics end no training
                LOGGER.exception("the metrics of a step could not be passed on")

    def _look(self) -> None:
        """Report a stall once, and its end once."""
        if self._stalls is None:
            return
        call, waiting = self._oldest(), self._waiting
        if call is None and not waiting:
            if self._stalls.forget():
                self._say_of_stall("")
            return
        was_told = bool(self._stalls.told)
        title = "a step" if call is None else f"{call.run.name} (call {call.number})"
        lines = [waiting] if waiting else _lines_of(call)
        words = self._stalls.look(title, lines, time.monotonic(), patience=TUNING.first_call if self._is_new else 1.0)
        if words is not None:
            self._say_of_stall(words)
        elif was_told and not self._stalls.told:
            self._say_of_stall("")

    def _say_of_stall(self, words: str) -> None:
        LOGGER.error("%s", words or "the step that stood still goes on")
        if self._on_stall is not None:
            self._on_stall(words)


def _lines_of(call: _Call | None) -> list[str]:
    """Describe where a call is."""
    if call is None:
        return []
    lines = call.run.standing()
    if lines:
        return lines
    if call.launched_s is None:
        return ["its arrays are being placed, or it waits for its first results"]
    return [
        "it was launched, and its results are not there: a device waits in a collective for another one, or a callback does not "
        "return"
    ]


def _wait(result: jax.Array | None, until_s: float) -> bool:
    """Wait for a result until the time `until_s`. Returns whether the result exists."""
    pause_s = TUNING.shortest_pause_s
    while not is_ready(result):
        if time.monotonic() > until_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, TUNING.longest_pause_s)
    return True


def _witness(results: Sequence[object]) -> jax.Array | None:
    """Return the result to wait for: the smallest, such as a loss, which the next step does not consume."""
    arrays = [x for x in results if isinstance(x, jax.Array) and not x.is_deleted()]
    return min(reversed(arrays), key=lambda x: x.size, default=None)
