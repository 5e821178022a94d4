"""What is said of several stages, said once.

In: sentences with the stages that they are about. Out: fewer of them: those that differ in sizes and times alone become one,
with the range of each figure, the least first. Counts belong together, as in "3 of 8 parameters", so sentences that differ in
these stay apart, unless that makes more than `MOST_APART`. What can go wrong: of more, counts are ranges too, "3 to 5 of 8 to 9";
`--full` shows each stage's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from autopar.explain.stages import stages_text

MOST_APART = 3
"""So many sentences may differ in their counts alone; more are one."""
_UNITS = {
    "": 1.0, "%": 1.0, " ns": 1e-9, " us": 1e-6, " ms": 1e-3, " s": 1.0,
    " B": 1.0, " KiB": 2.0**10, " MiB": 2.0**20, " GiB": 2.0**30, " TiB": 2.0**40, " PiB": 2.0**50,
}  # fmt: skip
_FIGURE = re.compile(r"(?<![\w{.,])([<>]?\d+(?:,\d{3})*(?:\.\d+)?)( (?:[KMGTP]iB|[num]s|B|s)\b|%|(?![\w}]))")


def group_sentences(said: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Sentences of stages, those alike but for their figures together, in the order of the first."""
    alike: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[int, str]]]] = {}
    for stage, text in said:
        pieces = _pieces(text)
        by_counts = alike.setdefault(tuple(pieces[::2]), {})
        by_counts.setdefault(tuple(filter(_is_count, pieces[1::2])), []).append((stage, text))
    for by_counts in alike.values():
        groups = list(by_counts.values())
        for same in groups if len(groups) <= MOST_APART else [sorted(itertools.chain.from_iterable(groups))]:
            yield f"{stages_text([stage for stage, _ in same])}: {_ranged([text for _, text in same])}"


def _is_count(figure: str) -> bool:
    """Whether a figure has no unit."""
    match = _FIGURE.fullmatch(figure)
    return match is not None and not match[2]


def _pieces(text: str) -> list[str]:
    """Words and figures in turns; a figure has its unit."""
    found, end = [], 0
    for match in _FIGURE.finditer(text):
        found += [text[end : match.start()], match[0]]
        end = match.end()
    return [*found, text[end:]]


def _ranged(texts: Sequence[str]) -> str:
    """Sentences that differ in their figures alone as one."""
    columns = zip(*map(_pieces, texts), strict=True)
    return "".join(_range(column) if number % 2 else column[0] for number, column in enumerate(columns))


def _range(figures: Sequence[str]) -> str:
    """The smallest figure to the largest."""
    ordered = sorted(dict.fromkeys(figures), key=_size)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _size(figure: str) -> float:
    match = _FIGURE.fullmatch(figure)
    assert match is not None
    exact = float(match[1].lstrip("<>").replace(",", ""))
    return exact * _UNITS[match[2]] + (1e-9 if match[1].startswith(">") else -1e-9 if match[1].startswith("<") else 0)
