"""SIGTERM and Ctrl-C end a run after a step, the same one in every process.

In: signals to any of the processes. Out: `StopRequest.is_due`, asked before each step. A process that got a signal says before
which step all stop: the next but one, for which no other process can have asked yet, as steps start together. What can go wrong:
a second signal, which ends the process at once.
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
    """Whether a run is to stop. `name` is that of the signal that this process, or another one, got."""

    def __init__(self, *, several: bool) -> None:
        """`several`: whether other processes run the same."""
        self.name: str | None = None
        self._own: str | None = None
        self._service: Coordination | None = coordination() if several else None
        self._key = f"autopar/stop/{next(_RUNS)}"
        self._at: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which the first signal is a request; a second one ends the process. Threads get no signals.

        A signal that is ignored stays ignored, as shells want of commands in the background.
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
        """Whether to stop before the step of this number; every process asks before every step."""
        if self._service is None:
            return self.name is not None
        if self._at is None:
            self._at = self._agreed(self._service, number)
        return self._at is not None and number >= self._at

    def _agreed(self, service: Coordination, number: int) -> int | None:
        """Before which step all stop, if any process has asked for it."""
        if self._own is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first, and its word counts
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
