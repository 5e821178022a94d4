"""The work of a step, whatever its layouts: what no arrangement of the devices takes less than.

In: equations of a step. Out: `Work`, the seconds of their operations on one device, without communication. Of each operation the
arithmetic and the bytes are divided among D devices at the best: a shard has at least 1 / D of them, and smaller products reach a
smaller part of the peak. Its launch is not divided: each device that takes part pays it. On one mesh all devices take part, so

    step >= (sum of divided) / D + (sum of launches)

Microbatches are the same work in smaller pieces, and recomputation is more work, so neither takes less. What can go wrong: a
program that computes less in pieces than as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence

from autopar.intra_op.choices.catalogue import Catalogue
from autopar.program.loops import LoopEquation
from autopar.program.program import Equation, Program
from autopar.rules.flops import number_format
from autopar.rules.table import entry_for


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds per step on one device.

    Attributes:
        divided_s: arithmetic and bytes moved, which devices divide among themselves.
        launches_s: what operations cost before they start.
    """

    divided_s: float
    launches_s: float

    def on_one_mesh_s(self, devices: int) -> float:
        """Seconds that no plan on one mesh of so many devices takes less than."""
        return self.divided_s / devices + self.launches_s

    def in_stages_s(self, devices: int) -> float:
        """Seconds for which the average of so many devices works, where each operation runs on some of them."""
        return (self.divided_s + self.launches_s) / devices


def find_work(program: Program, catalogue: Catalogue, *, among: Container[Equation] | None = None) -> Work:
    """The work of a program.

    Args:
        program: the program.
        catalogue: one of the machine, on any mesh.
        among: only that of these equations, with what is nested in them; None: of all.
    """
    traffic = catalogue.rules.traffic(program) if catalogue.cluster.device.fuses else {}
    divided_s = launches_s = 0.0
    for eqn, trips in _run([eqn for eqn in program.equations if among is None or eqn in among], 1.0):
        each_s, launch_s = catalogue.whole_seconds(eqn, traffic=traffic.get(eqn))
        divided_s += trips * each_s
        launches_s += trips * launch_s
    return Work(divided_s, launches_s)


def find_seconds_by_lengths(program: Program, catalogue: Catalogue) -> dict[frozenset[int], float]:
    """The seconds of `Work.divided_s`, by the lengths of all dimensions of an operation's operands and results."""
    traffic = catalogue.rules.traffic(program) if catalogue.cluster.device.fuses else {}
    found: dict[frozenset[int], float] = {}
    for eqn, trips in _run(program.equations, 1.0):
        lengths = frozenset(length for v in (*eqn.invars, *eqn.outvars) for length in v.aval.shape) - {0}
        each_s, _ = catalogue.whole_seconds(eqn, traffic=traffic.get(eqn))
        found[lengths] = found.get(lengths, 0.0) + trips * each_s
    return found


def find_flops(program: Program, catalogue: Catalogue) -> tuple[float, float]:
    """(floating-point operations of a program's contractions and convolutions, their seconds at one device's peak)."""
    flops = at_peak_s = 0.0
    for eqn, trips in _run(program.equations, 1.0):
        if entry_for(eqn).heavy:
            each = trips * catalogue.rules.flops(eqn)
            flops += each
            at_peak_s += each / catalogue.cluster.device.peak_of(number_format(eqn))
    return flops, at_peak_s


def _run(equations: Sequence[Equation], trips: float) -> Iterator[tuple[Equation, float]]:
    """Every ordinary equation, nested ones too, and how often it runs."""
    for eqn in equations:
        if isinstance(eqn, LoopEquation):
            for nested in eqn.nested:
                yield from _run(nested.program.equations, trips * max(eqn.loop.trips, 1))
        else:
            yield eqn, trips
