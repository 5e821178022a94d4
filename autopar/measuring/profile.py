"""One call under JAX's profiler: when each operation ran on each device.

In: what the profiler writes. Out: `Seen`s, one per execution of an operation. On CPU the profiler has an event per operation in
the line of the thread that ran it, with the operation's name, its program and the device; an operation that goes on in other
threads has another event at its end. On GPUs and TPUs the devices have planes of their own; on GPUs every event is a kernel, and
only those that were launched alone name their operation. A mark at the beginning of the session tells what `time.perf_counter`
said then, so that all times are those of that clock. What can go wrong: a profiler that runs already, or a platform whose events
name no operations; `NothingSeen` says so in words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import jax

_DEVICE_PLANE = "/device:"
_STREAM = "Stream"
"""How the lines of a GPU's plane begin that have its kernels."""
_COPY = "Memcpy"
_WHOLE_LINE = "XLA Ops"
"""The line of a device's plane that has all operations, where there is one."""
_END = "end: "
_MARK = "autopar: the clock"
"""The name of the event at the beginning of a session."""


class _Event(Protocol):
    """What the profiler writes of a moment."""

    name: str
    start_ns: float
    duration_ns: float
    stats: Iterable[tuple[str, object]]


class _Line(Protocol):
    """The events of a thread or a stream."""

    name: str
    events: Iterable[_Event]


class _Plane(Protocol):
    """The lines of the host or a device."""

    name: str
    lines: Iterable[_Line]


class NothingSeen(Exception):
    """The profiler told nothing; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """One execution of an operation, or one of its kernels on a GPU.

    Attributes:
        name: of the operation; empty if the profiler does not say.
        module: that it belongs to; empty if the profiler does not say.
        device: the number of the device.
        start_s: when it began.
        end_s: when it ended.
        kernel: the name of a GPU's kernel.
        graph: the CUDA graph and the launch of it that a kernel is part of.
        run: tells the executions of a program from each other; empty if the profiler does not say.
    """

    name: str
    module: str
    device: int
    start_s: float
    end_s: float
    kernel: str = ""
    graph: tuple[object, object] | None = None
    run: str = ""


def number_of(device: jax.Device) -> int:
    """The number that the profiler gives a device of this process: on CPUs its own, among all processes, else the hardware's."""
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


class Profile:
    """A session of the profiler around one call. `has_clock`: its times, once it has ended, are those of `time.perf_counter`."""

    def __init__(self) -> None:
        """Begin. Raises NothingSeen if the profiler cannot."""
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-")
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self._folder.name, profiler_options=options)
        except RuntimeError as error:
            self._folder.cleanup()
            raise NothingSeen(f"JAX's profiler could not be started: {error}") from None
        self.has_clock = False
        self._marked_s = time.perf_counter()
        with jax.profiler.TraceAnnotation(_MARK):
            pass

    def end(self) -> list[Seen]:
        """Stop, and return what was seen. Raises NothingSeen."""
        with self._folder:
            try:
                jax.profiler.stop_trace()
            except RuntimeError as error:
                raise NothingSeen(f"JAX's profiler did not write what it saw: {error}") from None
            paths = list(Path(self._folder.name).rglob("*.xplane.pb"))
            found = [one for path in paths for one in read_profile(path)]
            marks_s = [mark_s for path in paths for mark_s in _marks_of(path)]
        if not found:
            raise NothingSeen("JAX's profiler names no operations on this platform")
        self.has_clock = len(marks_s) == 1
        later_s = self._marked_s - marks_s[0] if self.has_clock else 0.0
        return [dataclasses.replace(one, start_s=one.start_s + later_s, end_s=one.end_s + later_s) for one in found]


def read_profile(path: Path) -> list[Seen]:
    """Every execution of an operation in a file of the profiler."""
    with _without_deprecations():
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        on_devices = [plane for plane in planes if plane.name.startswith(_DEVICE_PLANE)]
        found = [one for plane in on_devices for one in _of_device(plane)]
        return found or [one for plane in planes for one in _of_threads(plane)]


def _marks_of(path: Path) -> list[float]:
    """When the marks of the clock in a file began."""
    with _without_deprecations():
        planes = [
            p for p in jax.profiler.ProfileData.from_file(str(path)).planes if not p.name.startswith(_DEVICE_PLANE)
        ]
        events = (event for plane in planes for line in plane.lines for event in line.events)
        return [event.start_ns * 1e-9 for event in events if event.name == _MARK]


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib 0.12 warns of a type of its own
        yield


def _of_device(plane: _Plane) -> Iterator[Seen]:
    number = int("".join(filter(str.isdigit, plane.name.split(" ")[0].rsplit(":", 1)[-1])) or 0)
    lines = list(plane.lines)
    streams = [line for line in lines if line.name.startswith(_STREAM)]
    for line in streams or [line for line in lines if line.name == _WHOLE_LINE] or lines:
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats or (streams and not _is_of_jax(event.name, stats)):
                in_graph = "cuda_graph_id" in stats
                start_s = event.start_ns * 1e-9
                yield Seen(
                    name="" if in_graph else str(stats.get("hlo_op", "")),
                    module=str(stats.get("hlo_module", "")),
                    device=number,
                    start_s=start_s,
                    end_s=start_s + event.duration_ns * 1e-9,
                    kernel=event.name if streams else "",
                    graph=(stats["cuda_graph_id"], stats.get("correlation_id")) if in_graph else None,
                    run=str(stats.get("run_id", "")),
                )


def _is_of_jax(kernel: str, stats: Mapping[str, object]) -> bool:
    """Whether a kernel is a copy that no program made: JAX moves arrays to and from devices."""
    return kernel.startswith(_COPY) and not {"hlo_module", "cuda_graph_id"} & stats.keys()


def _of_threads(plane: _Plane) -> list[Seen]:
    """Operations in the lines of threads; each lasts until the event that marks its end, if that comes later."""
    begun: list[tuple[Seen, object]] = []
    ends: dict[object, float] = {}
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            start_s = event.start_ns * 1e-9
            if event.name.startswith(_END):
                ends[stats.get("_c")] = start_s
            elif "hlo_op" in stats:
                device = stats.get("device_ordinal", 0)
                assert isinstance(device, int)
                seen = Seen(
                    name=str(stats["hlo_op"]),
                    module=str(stats.get("hlo_module", "")),
                    device=device,
                    start_s=start_s,
                    end_s=start_s + event.duration_ns * 1e-9,
                    run=str(stats.get("run_id", "")),
                )
                begun.append((seen, stats.get("_p")))
    return [dataclasses.replace(seen, end_s=max(seen.end_s, ends.get(key, 0.0))) for seen, key in begun]
