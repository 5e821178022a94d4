"""SIGTERM and Ctrl-C end a run after a step, the same one in every process.

In: signals to any of the processes. Out: `StopRequest.is_due`, which a run asks before each step. A process that gets a signal
publishes the step before which all stop. That is the next step but one: no other process can have asked about it yet, because
steps start together. What can go wrong: a second signal comes. It ends the process at once.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax

from autopar.compat import Coordination, coordination

_RUNS = itertools.count()
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A request to stop a run. `name` is the name of the signal that this process, or another one, got."""

    def __init__(self, *, several: bool) -> None:
        """Make a request that is not due. `several`: whether other processes run the same steps."""
        self.name: str | None = None
        self._own: str | None = None
        self._service: Coordination | None = coordination() if several else None
        self._key = f"autopar/stop/{next(_RUNS)}"
        self._at: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Open a context in which the first signal is a request, and a second one ends the process.

        Only the main thread gets signals. An ignored signal stays ignored, as shells expect of commands in the background.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def is_due(self, number: int) -> bool:
        """Whether to stop before the step with this number. Every process asks before every step."""
        if self._service is None:
            return self.name is not None
        if self._at is None:
            self._at = self._agreed(self._service, number)
        return self._at is not None and number >= self._at

    def _agreed(self, service: Coordination, number: int) -> int | None:
        """Return the step before which all processes stop, or None if none has asked for it."""
        if self._own is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first, and its step counts
                service.key_value_set_bytes(f"{self._key}/at", f"{number + 1} {self._own}".encode())
        for _, said in service.key_value_dir_get_bytes(f"{self._key}/"):
            at, _, name = said.decode().partition(" ")
            self.name = self.name or name
            return int(at)
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._own is not None:
            raise KeyboardInterrupt
        self._own = signal.Signals(number).name
        self.name = self.name or self._own
