"""Faults at any moment of a run: raise, kill, stop, slow, corrupt, fill the disk.

In: a `Fault`, which names a moment and what is to happen there. Out: it happens, in this process, while `inject` is in force; or
in the workers of `autopar launch --fault 'kill@step,count=7,rank=1'`. The moments are those of `autopar.events`: phases, steps,
instructions of pipelines, meetings of processes, files that are written. `faults.point("my moment")` is one of a script's own.

What can go wrong: a name that no moment has. Then nothing happens, and `inject` says so at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from autopar.errors import ArgumentError, warn
from autopar.events import Moment, observing, reach

Effect = Literal["raise", "kill", "stop", "slow", "corrupt", "full"]
KINDS = (
    "phase",
    "step",
    "launched",
    "instruction",
    "waiting",
    "heard",
    "gather",
    "read",
    "write",
    "replace",
    "written",
    "point",
)
TEXT = re.compile(
    r"(?P<effect>\w+)@(?P<kind>\w+)(:(?P<name>.*?))?(?P<more>(,(count|times|rank|attempt|seconds)=\d+(\.\d+)?)*)"
)


class InjectedFaultError(RuntimeError):
    """What a fault raises unless it is told to raise something else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What is to go wrong, and when.

    Attributes:
        effect: raise an error; kill or stop this process; be slow; corrupt the file, or the arrays, that the moment is about; or
            let the disk be full, which is an OSError.
        kind: of the moment, see `autopar.events`; `point` is the script's own.
        name: a pattern that the moment's name has to match, such as `backward 1*` or `*.json`.
        count: at which of the moments that match it happens first, from 1.
        times: at how many of them, from then on.
        rank: in which worker of `autopar launch`; in every process if None.
        attempt: in which attempt of `autopar launch`; in each if None.
        seconds: how long it takes, if it is slow.
        error: what is raised.
    """

    effect: Effect
    kind: str
    name: str = "*"
    count: int = 1
    times: int = 1
    rank: int | None = None
    attempt: int | None = None
    seconds: float = 1.0
    error: BaseException | None = None

    def __post_init__(self) -> None:
        """Refuse what never happens."""
        if self.effect not in get_args(Effect):
            raise ArgumentError(f"a fault has no effect {self.effect!r}; there are {', '.join(get_args(Effect))}")
        if self.kind not in KINDS:
            raise ArgumentError(f"there are no moments of kind {self.kind!r}; there are {', '.join(KINDS)}")
        if self.count < 1 or self.times < 1:
            raise ArgumentError(f"count={self.count} and times={self.times} of a fault count from 1")

    def __str__(self) -> str:
        """The fault as `parse` reads it."""
        named = "" if self.name == "*" else f":{self.name}"
        more = {name: getattr(self, name) for name in ("count", "times", "rank", "attempt", "seconds")}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        options = "".join(f",{name}={value}" for name, value in more.items() if value != defaults[name])
        return f"{self.effect}@{self.kind}{named}{options}"

    def is_here(self) -> bool:
        """Whether this process is one in which it happens."""
        wanted = {"AUTOPAR_RANK": self.rank, "AUTOPAR_ATTEMPT": self.attempt}
        return all(value is None or os.environ.get(name) == str(value) for name, value in wanted.items())


def parse(text: str) -> Fault:
    """A fault from `EFFECT@KIND[:NAME][,count=N][,times=N][,rank=N][,attempt=N][,seconds=S]`. Raises ArgumentError."""
    found = TEXT.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(
            f"{text!r} is no fault: write EFFECT@KIND[:NAME][,count=N][,times=N][,rank=N][,attempt=N][,seconds=S], "
            "as in kill@step,count=7,rank=1"
        )
    options: dict[str, float] = {}
    for option in filter(None, found["more"].split(",")):
        name, _, value = option.partition("=")
        options[name] = float(value) if name == "seconds" else int(float(value))
    return Fault(effect=found["effect"], kind=found["kind"], name=found["name"] or "*", **options)  # type: ignore[arg-type]


def point(name: str) -> None:
    """A moment of a script's own, at which a fault of kind `point` may happen."""
    reach("point", name)


@contextlib.contextmanager
def inject(*faults: Fault | str) -> Iterator[None]:
    """A context in which faults happen, in all threads of this process. Warns of those whose moment never came."""
    armed = [_Armed(parse(fault) if isinstance(fault, str) else fault) for fault in faults]
    with contextlib.ExitStack() as stack:
        for one in armed:
            if one.fault.is_here():
                stack.enter_context(observing(one))
        yield
    missing = [one.fault for one in armed if one.fault.is_here() and not one.has_happened]
    if missing:
        warn(
            f"the moment of {', '.join(map(str, missing))} has never come: names of moments do not match, or there were too few "
            "of them"
        )


class _Armed:
    """A fault that waits for its moment."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.has_happened = fault, False
        self._matched, self._lock = 0, threading.Lock()

    def __call__(self, moment: Moment) -> None:
        fault = self.fault
        if moment.kind != fault.kind:
            return
        with self._lock:
            if not _matches(fault.name, moment.name):
                return
            self._matched += 1
            if not fault.count <= self._matched < fault.count + fault.times:
                return
            self.has_happened = True
        EFFECTS[fault.effect](fault, moment)


def _matches(pattern: str, name: str) -> bool:
    """Whether a name matches; the kind of an instruction, as in `run forward 0`, may be left out."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.partition(" ")[2], pattern)


def _raise(fault: Fault, moment: Moment) -> None:
    raise fault.error or InjectedFaultError(f"fault on purpose at {moment.kind} {moment.name}")


def _kill(fault: Fault, moment: Moment) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault, moment: Moment) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(fault: Fault, moment: Moment) -> None:
    time.sleep(fault.seconds)


def _fill(fault: Fault, moment: Moment) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), moment.name)


def _corrupt(fault: Fault, moment: Moment) -> None:
    if isinstance(moment.values, list):
        spoil(moment.values)
    elif isinstance(moment.about, str | os.PathLike) and Path(moment.about).is_file():
        flip(moment.about)
    else:
        raise ArgumentError(
            f"nothing can be corrupted at {moment.kind} {moment.name}: it has no arrays, and is no file"
        )


EFFECTS: Mapping[str, Callable[[Fault, Moment], None]] = MappingProxyType(
    {"corrupt": _corrupt, "full": _fill, "kill": _kill, "raise": _raise, "slow": _slow, "stop": _stop}
)


def spoil(values: list[object]) -> None:
    """Put NaN into the first array of floating point numbers, in a list of arrays and of lists of them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    for place, value in enumerate(values):
        if isinstance(value, Sequence) and not isinstance(value, str):
            inner = list(value)
            spoil(inner)
            if any(a is not b for a, b in zip(inner, value, strict=True)):
                values[place] = inner
                return
        elif isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(value.dtype, jnp.floating):
            with jax.debug_nans(False):
                values[place] = value * np.asarray(np.nan, value.dtype)
            return


def flip(path: str | os.PathLike[str], at: int | None = None) -> None:
    """Flip the bits of one byte of a file, that in its middle unless told otherwise.

    Raises ArgumentError if the file has no such byte.
    """
    with Path(path).open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        place = size // 2 if at is None else at
        if not 0 <= place < size:
            raise ArgumentError(f"{path} has {size} bytes, and none at {place} to flip")
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0xFF]))


@contextlib.contextmanager
def no_room(largest_bytes: int) -> Iterator[None]:
    """A context in which no file of this process may become larger: whoever writes more gets OSError, also in C++.

    It stands for a full disk where the writer is a library that tells autopar of no moment. The operating system's words are
    then "File too large".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
