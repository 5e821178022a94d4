"""Leaf paths and layouts as text; many paths as few patterns with braces.

In: paths such as `params/block_0/up`, `params/block_1/up`. Out: `params/block_{0,1}/up`. A pattern's braces multiply
out to exactly the paths it was made from, so a row of a table never claims a leaf that is not there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from autopar.plan import Spec

_NAMES_IN_BRACES = 6
_NUMBERED = re.compile(r"(\d+|\[\d+:\d+\])$")


def layout_text(spec: Spec) -> str:
    """A layout: `[x, -]` splits the first dimension over x; `[(x,y)]` splits over both; all whole is `replicated`."""
    if not any(spec):
        return "replicated"
    return "[" + ", ".join(axes_text(axes) for axes in spec) + "]"


def axes_text(axes: Sequence[str]) -> str:
    """Mesh axes: -, x or (x,y)."""
    if not axes:
        return "-"
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def shape_text(shape: Sequence[int]) -> str:
    """A shape: (128, 512)."""
    return str(tuple(shape))


def value_text(name: str, shape: Sequence[int]) -> str:
    """What a value is called where its shape stands beside it: an operation's result without the shape in its name."""
    return name.removesuffix(f" {shape_text(shape)}")


def is_words(path: str) -> bool:
    """Whether a value is told by words, as what stages send each other is, and not by a path."""
    return " " in path.removeprefix("-> ")


def source_text(source: str) -> str:
    """A line of source without the folders that say nothing: those of an environment, and the current one."""
    _, marker, inside = source.rpartition("/site-packages/")
    return inside if marker else source.removeprefix(f"{Path.cwd()}/")


def file_of(source: str) -> str:
    """A line of source with the name of its file alone: `gpt.py:56`, and the function if that is given."""
    path, separator, rest = source.partition(":")
    return f"{path.rpartition('/')[2]}{separator}{rest}"


def starred(first: Sequence[str], others: Sequence[Sequence[str]]) -> dict[str, str]:
    """The names of the first of several parts that are alike, as names of all: `block_2/up` is `block_*/up` if others lack it.

    A component with a number at its end, or with a range of rows, is starred unless all parts have it in the same place.
    """
    parts = [[tuple(name.split("/")) for name in names] for names in (first, *others)]
    shown: list[dict[tuple[str, ...], tuple[str, ...]]] = [dict.fromkeys(paths, ()) for paths in parts]
    for depth in range(max((len(path) for paths in parts for path in paths), default=0)):
        places = [{(done[path], path[depth]) for path in done if len(path) > depth} for done in shown]
        common = set.intersection(*places)
        for done in shown:
            for path, above in done.items():
                if len(path) > depth:
                    name = path[depth]
                    done[path] = (*above, name if (above, name) in common else _NUMBERED.sub(_star, name))
    return {"/".join(path): "/".join(names) for path, names in shown[0].items()}


def _star(number: re.Match[str]) -> str:
    return "[*]" if number[0].startswith("[") else "*"


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """One set of names per component of a path; it stands for every path of their product."""

    components: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return "/".join(map(_braces, self.components))

    @property
    def count(self) -> int:
        """How many paths it stands for."""
        return math.prod(map(len, self.components))

    @property
    def paths(self) -> list[str]:
        """Every path that it stands for."""
        return ["/".join(names) for names in itertools.product(*self.components)]

    @property
    def first(self) -> str:
        """The path of the first names."""
        return "/".join(names[0] for names in self.components)

    def without(self, position: int) -> tuple[object, ...]:
        """What another pattern must share to be merged with this one at `position`."""
        return (len(self.components), self.components[:position], self.components[position + 1 :])

    def union(self, other: PathPattern) -> PathPattern:
        """The pattern of both, which differ in one component."""
        pairs = zip(self.components, other.components, strict=True)
        return PathPattern(tuple(a if a == b else (*a, *b) for a, b in pairs))


def path_patterns(paths: Iterable[str]) -> list[PathPattern]:
    """Few patterns whose products are exactly the distinct `paths`.

    Two patterns that differ in one component become one with the union there; this is repeated until nothing changes.
    """
    patterns = [PathPattern(tuple((name,) for name in path.split("/"))) for path in dict.fromkeys(paths)]
    before = 0
    while len(patterns) != before:
        before = len(patterns)
        for position in range(max((len(pattern.components) for pattern in patterns), default=0)):
            merged: dict[tuple[object, ...], PathPattern] = {}
            for pattern in patterns:
                key = pattern.without(position)
                merged[key] = merged[key].union(pattern) if key in merged else pattern
            patterns = list(merged.values())
    return patterns


def _braces(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    numbered = [re.fullmatch(r"(.*?)(0|[1-9]\d*)", name) for name in names]
    prefixes = {match[1] for match in numbered if match}
    if all(numbered) and len(prefixes) == 1:
        return f"{prefixes.pop()}{{{_ranges([int(match[2]) for match in numbered if match])}}}"
    rest = len(names) - _NAMES_IN_BRACES
    return f"{{{','.join(names[:_NAMES_IN_BRACES])}{f', and {rest} more' if rest > 0 else ''}}}"


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Whole numbers in order, neighbours together."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _ranges(numbers: Iterable[int]) -> str:
    runs = runs_of(numbers)
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
