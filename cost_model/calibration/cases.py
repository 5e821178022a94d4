"""What is measured: products, pointwise work, collectives and calls, of sizes that tell on the platform at hand.

Compiling a case takes seconds on some platforms, so cases come in the order of what they tell: first those without which a figure
cannot be fitted, then one more of each kind and number format in turn. Lists of sizes below begin with the most telling ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from autopar.cost_model.calibration.tuning import TUNING

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"]
Kind = (
    Literal["product", "reordered", "transposed", "random", "pointwise", "operation", "dispatch", "transfer"]
    | Collective
)
PRODUCTS_CPU = (
    (512, 512, 512),
    (32, 32, 32),
    (128, 128, 128),
    (64, 256, 1024),
    (256, 64, 256),
    (1024, 256, 32),
    (16, 512, 512),
    (4096, 4, 256),
    (1024, 8, 512),
    (4096, 16, 64),
)
"""The last three are narrow, as channels split over many devices make them: libraries compute whole tiles."""
PRODUCTS = (
    (4096, 4096, 4096),
    (512, 512, 512),
    (8192, 1024, 128),
    (512, 4096, 4096),
    (4096, 128, 4096),
    *((size,) * 3 for size in (2048, 1024, 8192)),
)
ATTENTION_CPU = ((2, 64, 8, 32), (1, 128, 4, 64), (4, 128, 8, 16))
ATTENTION = ((4, 1024, 16, 64), (8, 2048, 16, 128))
TRANSPOSED_CPU = ((256, 1024), (1024, 256), (256, 128))
TRANSPOSED = ((4096, 4096), (16384, 1024), (1024, 1024))
CALLS = ((1,), (100,))
CALLS_CPU = ((50, 2**15), (50, 2**17), (20, 2**17))
"""As the tasks of a pipeline have them: they read what others made, and write arrays of their own."""
TRANSFERS_CPU = ((1, 2**12), (16, 2**12), (4, 2**20), (1, 2**20), (16, 2**17), (4, 2**12))
"""From a mesh of one half of the devices to one of the other."""
COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
ROUNDED = "tensorfloat32"
"""What products of float32 run in where nothing else is asked for; a device without it takes as long as in float32."""
NEEDED: Mapping[Kind, int] = {"dispatch": 2, "transfer": 3, **dict.fromkeys(COLLECTIVES, 2)}
"""How many cases of a kind its figures need, if more than one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        kind: What is done.
        sizes: m, n, k of a "product"; examples, positions, heads and width of "reordered" products; rows and columns of a
            "transposed" copy; bytes of "pointwise" and "random" work; ranks and bytes of a collective; the number of small
            operations of an "operation" case; arrays of a "dispatch", and bytes of each if its results do not take their places;
            arrays of a "transfer" between meshes, and bytes of each as a whole.
        dtype: The number format.
    """

    kind: Kind
    sizes: tuple[int, ...]
    dtype: str = "float32"

    @property
    def element_type(self) -> str:
        """The type of the operands' elements: products in `tensorfloat32` round elements of float32."""
        return "float32" if self.dtype == ROUNDED else self.dtype

    @property
    def label(self) -> str:
        """The case in words."""
        return f"{self.kind} {'x'.join(map(str, self.sizes))} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A case, its least seconds for one repetition, and the ratio of the median round to the least."""

    case: Case
    seconds: float
    spread: float


def cases_for(platform: str, devices: int) -> tuple[Case, ...]:
    """List what is worth measuring on this many devices of a platform, in the order of what it tells."""
    on_cpu = platform == "cpu"
    formats = ("float32",) if on_cpu else ("bfloat16", "float16", ROUNDED, "float32")
    shapes = PRODUCTS_CPU if on_cpu else PRODUCTS
    cases = [Case("product", shape, dtype) for dtype in formats for shape in shapes]
    cases += [Case("reordered", sizes, formats[0]) for sizes in (ATTENTION_CPU if on_cpu else ATTENTION)]
    cases += [Case("transposed", sizes, formats[0]) for sizes in (TRANSPOSED_CPU if on_cpu else TRANSPOSED)]
    cases += [Case("random", (size,), "uint32") for size in ((2**18, 2**16) if on_cpu else (2**26, 2**22))]
    lengths = (2**23, 2**12, 2**20, 2**16) if on_cpu else (2**29, 2**16, 2**26, 2**22)
    cases += [Case("pointwise", (length,)) for length in lengths]
    cases += [Case("operation", (TUNING.chains * TUNING.chain_length,))]
    cases += [Case("dispatch", sizes) for sizes in (*CALLS, *(CALLS_CPU if on_cpu else ()))]
    cases += [Case("transfer", sizes) for sizes in (TRANSFERS_CPU if on_cpu and devices > 1 else ())]
    groups = [n for n in range(2, devices + 1) if devices % n == 0 and (n & (n - 1) == 0 or n == devices)]
    payloads = (2**22, 2**10, 2**20, 2**16) if on_cpu else (2**26, 2**12, 2**20)
    cases += [Case(kind, (n, size)) for kind in COLLECTIVES for n in reversed(groups) for size in payloads]
    needed = needed_of(cases)
    return (*needed, *_in_turn([case for case in cases if case not in needed]))


def needed_of(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The first of each kind and format, of calls and collectives the first two: their figures tell a start from a rate."""
    return tuple(case for own in _alike(cases) for case in own[: NEEDED.get(own[0].kind, 1)])


def _in_turn(cases: Sequence[Case]) -> Iterator[Case]:
    """One of each kind and format, another of each, and so on."""
    for turn in itertools.zip_longest(*_alike(cases)):
        yield from (case for case in turn if case is not None)


def _alike(cases: Sequence[Case]) -> list[list[Case]]:
    found: dict[tuple[Kind, str], list[Case]] = {}
    for case in cases:
        found.setdefault((case.kind, case.dtype), []).append(case)
    return list(found.values())
