"""Devices whose compute is a callback that sleeps, and what JAX takes from one such callback to the next.

In: a device of JAX. Out: an `EmulatedDevice`, which performs its tasks in the order of their launches and takes as long for
each as it is told. `pipeline_efficiency.py` says how such time is counted. What can go wrong: other work on the machine delays
threads.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALL = 8
BUSY_S = 0.1


Call = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


@dataclasses.dataclass
class _Queued:
    """A task between its launch and its end. `ready`: its inputs were there when it was launched, or when it was next."""

    inputs: Sequence[jax.Array]
    launched_s: float
    ready: bool = False

    def look(self) -> None:
        """Look whether the inputs are there."""
        self.ready = self.ready or all(array.is_ready() for array in self.inputs)


class EmulatedDevice:
    """One device that performs its tasks one after the other, as they were launched.

    Each task takes the token of the one before it and returns its own, as a stream of an accelerator would keep them in order.
    XLA's CPU client runs a program with a callback in the thread that launches it if all its inputs are there, and in a
    thread of its own otherwise: behind a token that is not there yet, tasks are launched ahead as on an accelerator.
    """

    def __init__(self, device: jax.Device, *, hop_s: float) -> None:
        """A device that has nothing to do; a task that waits for another device may be called `hop_s` late."""
        self.device = device
        self._hop_s = hop_s
        self.token = jax.device_put(jnp.zeros(()), device)
        self._queue: collections.deque[_Queued] = collections.deque()
        self._ended_s = 0.0
        self._occupied = self.program(self._occupy, [], lambda zero: [])
        self._free_s = 0.0

    def program(
        self,
        callback: Callable[[], None] | None,
        inputs: Sequence[int],
        outputs: Callable[[jax.Array], list[jax.Array]],
    ) -> Call:
        """Compile a task that waits for `callback`; `inputs` are sizes of vectors, `outputs` makes arrays of a zero."""

        def perform(_: Any) -> np.ndarray[Any, Any]:
            assert callback is not None
            callback()
            return np.zeros((), np.float32)

        def traced(token: jax.Array, *_: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            zero = token
            if callback is not None:
                zero = jax.pure_callback(perform, jax.ShapeDtypeStruct((), np.float32), token)
            return zero, outputs(zero)

        place = jax.sharding.SingleDeviceSharding(self.device)
        shapes = [jax.ShapeDtypeStruct(shape, np.float32, sharding=place) for shape in ((), *((n,) for n in inputs))]
        compiled = jax.jit(traced, out_shardings=place, keep_unused=True).lower(*shapes).compile()

        def launch(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
            if callback is not None:
                queued = _Queued(arrays, time.perf_counter())
                queued.look()
                self._queue.append(queued)
            self.token, results = compiled(self.token, *arrays)
            return results

        return launch

    def occupy(self, until_s: float, unready: jax.Array) -> None:
        """Give the device something to do until then, as a step before would; `unready` is a token that is not there yet."""
        self._free_s = until_s
        self.token = jax.device_put(unready, self.device)
        self._occupied([])

    def _occupy(self) -> None:
        self._sleep_until(self._free_s)

    def work(self, seconds: float) -> None:
        """Sleep until the oldest queued task has had its time: from the end of the task before, or from when it was ready."""
        task = self._queue[0]
        called_s = 0.0 if task.ready else time.perf_counter() - self._hop_s
        self._sleep_until(max(task.launched_s, self._ended_s, called_s) + seconds)

    def _sleep_until(self, end_s: float) -> None:
        time.sleep(max(0.0, end_s - time.perf_counter()))
        self._ended_s = end_s
        self._queue.popleft()
        if self._queue:
            self._queue[0].look()


def measure_hop(*, task_s: float, length: int = 24, chains: int = 5) -> float:
    """Seconds per task, beyond the task's, of chains between two devices that a plain loop launches ahead: the least."""
    devices = [EmulatedDevice(device, hop_s=0.0) for device in jax.devices()[:2]]

    def task_of(device: EmulatedDevice) -> Call:
        return device.program(lambda: device.work(task_s), [SMALL], lambda zero: [jnp.broadcast_to(zero, (SMALL,))])

    tasks = [task_of(device) for device in devices]

    def chain_s() -> float:
        array = jax.device_put(jnp.ones(SMALL), devices[0].device)
        started = occupy(devices, BUSY_S)
        for step in range(length):
            (array,) = tasks[step % 2]([jax.device_put(array, devices[step % 2].device)])
        jax.block_until_ready(array)
        return time.perf_counter() - started

    chain_s()
    return max(0.0, min(chain_s() for _ in range(chains)) / length - task_s)


def occupy(devices: Sequence[EmulatedDevice], busy_s: float) -> float:
    """Give devices something to do for so long, as a step before would; returns when they are free."""
    free_s = time.perf_counter() + busy_s
    unready = _unready()
    for device in devices:
        device.occupy(free_s, unready)
    return free_s


@jax.jit
def _product_of_three(matrix: jax.Array) -> jax.Array:
    return (matrix @ matrix @ matrix)[0, 0]


def _unready() -> jax.Array:
    """A number that will be there in some milliseconds: XLA's CPU client launches products ahead."""
    return _product_of_three(jnp.zeros((1000, 1000)))
