"""Memory rows one by one, and as spans: what each choice of a node takes from one row to another.

In: `MemoryRow`s, or spans as they are known of a program whose values live from one time to another. Out: `Spans`, flat arrays
that answer for all rows at once: what a choice uses, what prices on the rows cost each choice. `SpanRows` is a sequence of rows
that are made when they are looked at: tens of thousands of rows over thousands of nodes each take no memory. What can go wrong:
sums in another order round differently in the last digit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np

ROUNDING = 1e-12
"""What exceeds its room by at most this part of the limit counts as rounding where choices are ruled out."""


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryRow:
    """The values alive at one program point.

    Attributes:
        name: which point, for the reader of an infeasible model.
        bytes_of: m_v by node: bytes, a float array (choices of v,).
        fixed_bytes: what is alive whatever is chosen.
    """

    name: str
    bytes_of: Mapping[int, np.ndarray]
    fixed_bytes: float = 0.0

    def used(self, choice: Sequence[int]) -> float:
        """Bytes under a choice."""
        return self.fixed_bytes + sum(float(b[choice[v]]) for v, b in self.bytes_of.items())

    def least(self) -> float:
        """Bytes that no choice can avoid."""
        return self.fixed_bytes + sum(float(b.min()) for b in self.bytes_of.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Levels:
    """What one node uses in all its spans together.

    Attributes:
        cuts: the rows at which what it uses changes, and the row after its last, ascending ints (parts + 1,).
        used: the different ways in which its choices use the rows of each part, bytes, a float array (levels, parts).
        level_of: which of them each choice is, ints (choices,).
    """

    cuts: np.ndarray
    used: np.ndarray
    level_of: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Spans:
    """What the choices of nodes use from one row to another. A node may have many spans, and they may overlap.

    Attributes:
        fixed: bytes of each row whatever is chosen, a float array (rows,).
        node: the node of each span, ints (spans,).
        begin: the first row of each span, ints (spans,).
        end: the row after its last, ints (spans,).
        first: the first entry of each span in `used`, and the number of entries at the end, ints (spans + 1,).
        used: bytes of each choice of each span's node, span after span, a float array (entries,).
    """

    fixed: np.ndarray
    node: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    first: np.ndarray
    used: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[MemoryRow]) -> Spans:
        """Spans over which consecutive rows say the same of a node."""
        if isinstance(rows, SpanRows):
            return rows.spans
        open_: dict[int, tuple[int, np.ndarray]] = {}
        spans: list[tuple[int, int, int, np.ndarray]] = []
        for t, row in enumerate(rows):
            for v in [v for v in open_ if v not in row.bytes_of]:
                begin, used = open_.pop(v)
                spans.append((v, begin, t, used))
            for v, used in row.bytes_of.items():
                if v in open_ and not (open_[v][1] is used or np.array_equal(open_[v][1], used)):
                    begin, before = open_.pop(v)
                    spans.append((v, begin, t, before))
                open_.setdefault(v, (t, used))
        spans += [(v, begin, len(rows), used) for v, (begin, used) in open_.items()]
        return cls.join(spans, np.array([row.fixed_bytes for row in rows], dtype=float))

    @classmethod
    def join(cls, spans: Sequence[tuple[int, int, int, np.ndarray]], fixed: np.ndarray) -> Spans:
        """Spans given one by one: node, first row, the row after the last, bytes of each choice (choices,)."""
        used = [span[3] for span in spans]
        node, begin, end = np.array([span[:3] for span in spans], dtype=np.int64).reshape(-1, 3).T
        first = np.concatenate([[0], np.cumsum([len(each) for each in used])]).astype(np.int64)
        bytes_used = np.concatenate(used).astype(float) if used else np.zeros(0)
        return cls(fixed=fixed, node=node, begin=begin, end=end, first=first, used=bytes_used)

    def each(self) -> list[np.ndarray]:
        """Bytes of each choice (choices,), span by span."""
        return np.split(self.used, self.first[1:-1]) if len(self.node) else []

    def sum_over_rows(self, bytes_of_span: np.ndarray) -> np.ndarray:
        """Bytes of each row (rows,), given those of each span (spans,)."""
        change = np.bincount(self.begin, bytes_of_span, len(self.fixed) + 1)
        change -= np.bincount(self.end, bytes_of_span, len(self.fixed) + 1)
        total: np.ndarray = self.fixed + np.cumsum(change)[:-1]
        return total

    def used_by(self, choice: np.ndarray) -> np.ndarray:
        """Bytes of each row (rows,) under a choice, ints (nodes,)."""
        return self.sum_over_rows(self.used[self.first[:-1] + choice[self.node]])

    def least(self) -> np.ndarray:
        """Bytes of each row that no choice can avoid (rows,)."""
        return self.sum_over_rows(self._reduce(np.minimum))

    def most(self) -> np.ndarray:
        """Bytes of each row that no choice can exceed (rows,)."""
        return self.sum_over_rows(self._reduce(np.maximum))

    def _reduce(self, function: np.ufunc) -> np.ndarray:
        reduced: np.ndarray = function.reduceat(self.used, self.first[:-1]) if len(self.node) else np.zeros(0)
        return reduced

    def places(self, first_place: np.ndarray) -> np.ndarray:
        """The place of each entry of `used`, given the first place of each node: ints (entries,)."""
        counts = np.diff(self.first)
        places: np.ndarray = np.arange(len(self.used)) + np.repeat(first_place[self.node] - self.first[:-1], counts)
        return places

    def price(self, prices: np.ndarray, first_place: np.ndarray) -> np.ndarray:
        """What prices per byte of each row (rows,) cost each place, in the unit of the prices (places,)."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        each = np.repeat(paid[self.end] - paid[self.begin], np.diff(self.first)) * self.used
        total: np.ndarray = np.bincount(self.places(first_place), each, int(first_place[-1]))
        return total

    def expand(self, first_place: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, place and bytes of each entry of each row; a place may come several times in a row."""
        counts, lengths = np.diff(self.first), self.end - self.begin
        (spanned,) = np.nonzero(self.used)
        span = np.repeat(np.arange(len(self.node)), counts)[spanned]
        times = lengths[span]
        within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        rows = np.repeat(self.begin[span], times) + within
        return rows, np.repeat(self.places(first_place)[spanned], times), np.repeat(self.used[spanned], times)

    def beyond_least(self) -> Spans:
        """The same with what no choice avoids in `fixed`; spans without a choice go."""
        least = self._reduce(np.minimum)
        varies = self._reduce(np.maximum) > least
        used = self.used - np.repeat(least, np.diff(self.first))
        counts = np.diff(self.first)[varies]
        return Spans(
            fixed=self.sum_over_rows(least),
            node=self.node[varies],
            begin=self.begin[varies],
            end=self.end[varies],
            first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            used=used[np.repeat(varies, np.diff(self.first))],
        )

    def find_needed(self, limit_bytes: float) -> np.ndarray:
        """Rows that together say the same as all, ascending ints (rows needed,).

        A row goes if all choices keep it, or if a row next to it has all its spans and at least its fixed bytes. Bytes must not
        be negative, as `beyond_least` makes them.
        """
        rows = np.flatnonzero(self.most() > limit_bytes)
        begun = np.cumsum(np.bincount(self.begin, minlength=len(self.fixed) + 1))
        ended = np.cumsum(np.bincount(self.end, minlength=len(self.fixed) + 1))
        before, stays = -1, np.zeros(1, dtype=bool)
        while before != len(rows):
            before = len(rows)
            here, there = rows[:-1], rows[1:]
            goes = (ended[there] == ended[here]) & (self.fixed[there] >= self.fixed[here])
            rows = rows[~np.append(goes, stays[: len(rows)])]
            here, there = rows[:-1], rows[1:]
            goes = (begun[there] == begun[here]) & (self.fixed[there] <= self.fixed[here])
            rows = rows[~np.append(stays[: len(rows)], goes)]
        return rows

    def find_levels(self, sizes: Sequence[int]) -> dict[int, Levels]:
        """What each node that has spans uses; `sizes` are the numbers of choices of all nodes."""
        spans_of: dict[int, list[int]] = {}
        for i, v in enumerate(self.node.tolist()):
            spans_of.setdefault(v, []).append(i)
        levels = {}
        for v, of in spans_of.items():
            begin, end = self.begin[of], self.end[of]
            cuts = np.unique(np.concatenate([begin, end]))
            used = np.zeros((sizes[v], len(cuts) - 1))
            lows, highs = np.searchsorted(cuts, begin).tolist(), np.searchsorted(cuts, end).tolist()
            for i, low, high in zip(of, lows, highs, strict=True):
                used[:, low:high] += self.used[self.first[i] : self.first[i + 1], None]
            different, level_of = np.unique(used, axis=0, return_inverse=True)
            levels[v] = Levels(cuts, different, level_of.ravel())
        return levels

    def find_fitting(self, limit_bytes: float, first_place: np.ndarray) -> np.ndarray:
        """Which choices fit beside the least of all other nodes, bools (places,), given the first place of each node.

        What a choice uses is added up over its node's spans, from each row at which it changes to the next.
        """
        spans = self.beyond_least()
        nodes, rows = len(first_place) - 1, len(self.fixed) + 1
        begin, end = spans.node * rows + spans.begin, spans.node * rows + spans.end
        cuts = np.unique(np.concatenate([begin, end]))
        first_cut = np.searchsorted(cuts // rows, np.arange(nodes + 1))
        place, node = spans.places(first_place), np.repeat(np.arange(nodes), np.diff(first_place))
        counts = np.diff(first_cut)[node]
        first_cell = np.cumsum(counts) - counts  # of each place: a cell for each cut of its node
        cells = int(counts.sum())
        used = np.zeros(cells)
        for at, sign in ((begin, 1.0), (end, -1.0)):
            cut = np.repeat(np.searchsorted(cuts, at) - first_cut[spans.node], np.diff(spans.first))
            used += sign * np.bincount(first_cell[place] + cut, spans.used, cells)
        used = np.cumsum(used)
        room = _least_between(limit_bytes - spans.fixed, cuts % rows) + ROUNDING * abs(limit_bytes)
        cut_of = np.arange(cells) - np.repeat(first_cell - first_cut[node], counts)
        is_fit = np.ones(len(node), dtype=bool)
        is_fit[np.repeat(np.arange(len(node)), counts)[used > room[cut_of]]] = False
        return is_fit

    def at(self, t: int) -> MemoryRow:
        """One row."""
        bytes_of: dict[int, np.ndarray] = {}
        for i in np.flatnonzero((self.begin <= t) & (t < self.end)).tolist():
            v, used = int(self.node[i]), self.used[self.first[i] : self.first[i + 1]]
            bytes_of[v] = bytes_of[v] + used if v in bytes_of else used
        return MemoryRow(str(t), bytes_of, float(self.fixed[t]))

    def restrict(self, left: Sequence[np.ndarray]) -> Spans:
        """The spans over the choices `left` of each node, ints (choices left,)."""
        used = [each[left[v]] for v, each in zip(self.node.tolist(), self.each(), strict=True)]
        first = np.concatenate([[0], np.cumsum([len(each) for each in used])]).astype(np.int64)
        return dataclasses.replace(self, first=first, used=np.concatenate(used) if used else np.zeros(0))

    def take_rows(self, kept: np.ndarray) -> Spans:
        """The spans over the rows `kept`, ascending ints (rows left,); spans that touch none of them go."""
        begin, end = np.searchsorted(kept, self.begin), np.searchsorted(kept, self.end)
        left, counts = begin < end, np.diff(self.first)
        first = np.concatenate([[0], np.cumsum(counts[left])]).astype(np.int64)
        used = self.used[np.repeat(left, counts)]
        return Spans(
            fixed=self.fixed[kept], node=self.node[left], begin=begin[left], end=end[left], first=first, used=used
        )


def _least_between(values: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """The least of the values from each cut up to the next, infinite where that does not come later, a float array (cuts,)."""
    least = np.full(len(cuts), np.inf)
    (ascending,) = np.nonzero(np.diff(cuts) > 0)
    width = cuts[ascending + 1] - cuts[ascending]
    level, reach = values, 1
    while len(ascending) and reach <= width.max():
        (here,) = np.nonzero((width >= reach) & (width < 2 * reach))
        at = ascending[here]
        least[at] = np.minimum(level[cuts[at]], level[cuts[at + 1] - reach])
        level, reach = np.minimum(level[:-reach], level[reach:]), 2 * reach
    return least


def find_peaks(used: np.ndarray, limit_bytes: float) -> np.ndarray:
    """The highest row of each run of rows above the limit, ascending ints; `used` are bytes of each row (rows,)."""
    over = np.concatenate([[False], used > limit_bytes, [False]])
    begins, ends = np.flatnonzero(over[1:] & ~over[:-1]), np.flatnonzero(~over[1:] & over[:-1])
    return np.array(
        [b + int(np.argmax(used[b:e])) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)], dtype=np.int64
    )


class SpanRows(Sequence[MemoryRow]):
    """The rows of spans, each made when it is looked at."""

    def __init__(self, spans: Spans) -> None:
        """Rows 0, 1, ... named by their numbers."""
        self.spans = spans

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.spans.fixed)

    @overload
    def __getitem__(self, index: int) -> MemoryRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[MemoryRow]: ...

    def __getitem__(self, index: int | slice) -> MemoryRow | list[MemoryRow]:
        """One row, or several."""
        if isinstance(index, slice):
            return [self.spans.at(t) for t in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.spans.at(index % len(self))
