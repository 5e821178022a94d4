"""Seconds in which stages send each other what crosses between layers, and what several of them share.

In: the machine, how many devices all stages have, bytes that cross after each layer. Out: arrays [first layer, end layer] for a
table of costs. What can go wrong: a link is priced as if nothing else were on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.cost_model.hardware import Cluster
from autopar.inter_op.dynamic_program.submeshes import send_s


class Sends:
    """What stages send each other takes. `crossing_bytes`: after each layer but the last, of all examples together."""

    def __init__(self, cluster: Cluster, devices: int, crossing_bytes: Sequence[float]) -> None:
        self._cluster, self._devices, self._crossing = cluster, devices, (0.0, *crossing_bytes, 0.0)
        self._known: dict[tuple[float, int], tuple[float, float]] = {}

    def each_s(self, count: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
        """[i, j] of a microbatch, of which there are `count`: seconds of a mesh's work to send forward what crosses after layer
        j - 1, and back the gradient of what came before layer i; and seconds to send both over the link after j. One of the two
        is 0.
        """
        each_s = np.array([[self._send_s(size / count, devices)[0] for size in self._crossing]])
        nothing = np.zeros_like(each_s)
        return (each_s[:, :-1].T + each_s, nothing) if self._cluster.shares_host else (nothing, 2 * each_s)

    def once_s(self, shared_bytes: np.ndarray, devices: int) -> np.ndarray:
        """[i, j]: seconds to exchange tied weights, their gradients, norms and the like with other stages, of so many bytes."""
        sizes, place = np.unique(shared_bytes, return_inverse=True)
        each_s = [self._send_s(size, devices)[1] for size in sizes]
        return np.array(each_s)[place].reshape(shared_bytes.shape)

    def _send_s(self, size: float, devices: int) -> tuple[float, float]:
        """(mean, most) seconds to send a value to the next stage."""
        if (size, devices) not in self._known:
            sent = send_s(self._cluster, size, devices=self._devices, each=devices) if size else (0.0, 0.0)
            self._known[size, devices] = sent
        return self._known[size, devices]
