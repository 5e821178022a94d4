"""The algorithms of `algorithms` as lists of messages, for `event_simulation` to play.

In: the sizes of the levels that the ranks span, the innermost first; a rank is its coordinates. Out: messages in steps, where a
message follows the earlier ones that brought its data. Blocks of a reduction or gather are coordinates as well: the one that
rank r ends up with, or begins with, is r. All-to-all blocks are (origin, target). What can go wrong is caught by playing them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal

from tests.cost_model.event_simulation import Block, Message, Rank

Sizes = Sequence[int]
How = Literal["ring", "butterfly", "line"]
Pieces = Callable[[Rank], Block]
"""Names the block at some coordinates; parts of a split operand name theirs apart."""


def ranks_of(sizes: Sizes) -> list[Rank]:
    """All coordinates."""
    return list(itertools.product(*(range(size) for size in sizes)))


def reduce_scatter(
    sizes: Sizes,
    how: Sequence[How],
    *,
    order: Sequence[int] | None = None,
    pieces: Pieces = tuple,
    turn: int = 1,
    channel: Hashable = None,
) -> list[Message]:
    """Level by level in `order`; on each every rank keeps the blocks of its own coordinate. `turn`: direction of rings."""
    messages: list[Message] = []
    through: list[int] = []
    step = 0
    for level in order or range(len(sizes)):
        for exchange in _scatter_steps(sizes[level], how[level], turn):
            messages += _along(sizes, level, through, exchange, step, pieces, combine=True, channel=channel)
            step += 1
        through.append(level)
    return messages


def all_gather(
    sizes: Sizes,
    how: Sequence[How],
    *,
    order: Sequence[int] | None = None,
    pieces: Pieces = tuple,
    turn: int = 1,
    channel: Hashable = None,
) -> list[Message]:
    """The same backwards: `order` is that of the reduce-scatter, the last level is gathered first."""
    levels = list(order or range(len(sizes)))
    messages: list[Message] = []
    step = 0
    while levels:
        level = levels.pop()
        for exchange in _gather_steps(sizes[level], how[level], turn):
            messages += _along(sizes, level, levels, exchange, step, pieces, combine=False, channel=channel)
            step += 1
    return messages


Exchange = list[tuple[int, int, frozenset[int]]]
"""One step on a level: (from, to, coordinates of the blocks sent)."""


def _scatter_steps(f: int, how: How, turn: int) -> list[Exchange]:
    """Steps after which position i of a level has combined all that belongs to i: those of the gather, backwards.

    The gather runs the other way round, so that backwards it has the direction asked for.
    """
    return [[(to, source, blocks) for source, to, blocks in step] for step in reversed(_gather_steps(f, how, -turn))]


def _gather_steps(f: int, how: How, turn: int) -> list[Exchange]:
    """Steps after which every position of a level has the blocks of all; position i begins with block i."""
    if how == "ring":
        return [[(i, (i + turn) % f, frozenset({(i - turn * t) % f})) for i in range(f)] for t in range(f - 1)]
    if how == "line":
        right = [[(i, i + 1, frozenset({i - t})) for i in range(t, f - 1)] for t in range(f - 1)]
        left = [[(i, i - 1, frozenset({i + t})) for i in range(1, f - t)] for t in range(f - 1)]
        return [a + b for a, b in zip(right, left, strict=True)]
    steps = []
    for bit in range(f.bit_length() - 1):
        d = 1 << bit
        steps.append([(i, i ^ d, frozenset(j for j in range(f) if j // d == i // d)) for i in range(f)])
    return steps


def _along(
    sizes: Sizes,
    level: int,
    through: Sequence[int],
    exchange: Exchange,
    step: int,
    pieces: Pieces,
    *,
    combine: bool,
    channel: Hashable,
) -> list[Message]:
    """One step of a level on all its lines; blocks agree with the rank on the levels that are `through`."""
    messages = []
    for rank in ranks_of(sizes):
        for source, to, coordinates in exchange:
            if rank[level] != source:
                continue
            wanted = [
                pieces(block)
                for block in ranks_of(sizes)
                if block[level] in coordinates and all(block[j] == rank[j] for j in through)
            ]
            target = (*rank[:level], to, *rank[level + 1 :])
            messages.append(Message(step, rank, target, frozenset(wanted), combine, channel))
    return messages


def all_reduce(sizes: Sizes, how: Sequence[How]) -> list[Message]:
    """Reduce-scatter from the inside out, then all-gather from the outside in."""
    return in_sequence(reduce_scatter(sizes, how), all_gather(sizes, how))


def in_sequence(*plans: Sequence[Message]) -> list[Message]:
    """One plan after the other: later ones wait for the data of earlier ones, not for their end."""
    messages: list[Message] = []
    for plan in plans:
        first = max((m.step for m in messages), default=-1) + 1
        messages += [Message(m.step + first, m.source, m.target, m.blocks, m.combine, m.channel) for m in plan]
    return messages


def torus_reduce_scatter(sizes: Sizes) -> list[Message]:
    """Each of d parts begins with another dimension; each part goes round its rings in both directions, half each way."""
    return _in_parts(sizes, reduce_scatter)


def torus_all_gather(sizes: Sizes) -> list[Message]:
    """The same backwards."""
    return _in_parts(sizes, all_gather)


def _in_parts(sizes: Sizes, plan: Callable[..., list[Message]]) -> list[Message]:
    d = len(sizes)
    messages: list[Message] = []
    for part, turn in itertools.product(range(d), (1, -1)):
        order = [(part + phase) % d for phase in range(d)]

        def piece(block: Rank, part: int = part, turn: int = turn) -> Block:
            return (part, turn, block)

        messages += plan(sizes, ["ring"] * d, order=order, pieces=piece, turn=turn, channel=turn)
    return messages


def tree_broadcast(n: int, blocks: Iterable[Block]) -> list[Message]:
    """Binomial tree from rank 0: in step t all ranks below 2^t send to the one 2^t further."""
    whole = frozenset(blocks)
    steps = range((n - 1).bit_length())
    return [Message(t, (i,), (i + 2**t,), whole) for t in steps for i in range(2**t) if i + 2**t < n]


def tree_reduce(n: int, blocks: Iterable[Block]) -> list[Message]:
    """The broadcast backwards, adding up."""
    return _backwards(tree_broadcast(n, blocks), combine=True)


def tree_gather(n: int) -> list[Message]:
    """Binomial tree to rank 0: in step t the rank 2^t further sends its own block and those it has gathered."""
    messages = []
    for t in range((n - 1).bit_length()):
        for i in range(0, n - 2**t, 2 ** (t + 1)):
            blocks = frozenset((j,) for j in range(i + 2**t, min(i + 2 ** (t + 1), n)))
            messages.append(Message(t, (i + 2**t,), (i,), blocks))
    return messages


def tree_scatter(n: int) -> list[Message]:
    """The gather backwards."""
    return _backwards(tree_gather(n), combine=False)


def ring_gather(n: int) -> list[Message]:
    """Every block travels down the ring to rank 0, the nearest first."""
    return [Message(t, (i + 1,), (i,), frozenset({(i + 1 + t,)})) for t in range(n - 1) for i in range(n - 1 - t)]


def star_reduce(n: int, blocks: Iterable[Block]) -> list[Message]:
    """Every rank sends everything to rank 0."""
    whole = frozenset(blocks)
    return [Message(0, (i,), (0,), whole, combine=True) for i in range(1, n)]


def star_broadcast(n: int, blocks: Iterable[Block]) -> list[Message]:
    """Rank 0 sends everything to every rank."""
    return _backwards(star_reduce(n, blocks), combine=False)


def _backwards(messages: Sequence[Message], *, combine: bool) -> list[Message]:
    last = max(m.step for m in messages)
    turned = [Message(last - m.step, m.target, m.source, m.blocks, combine, m.channel) for m in messages]
    return sorted(turned, key=lambda m: m.step)


def direct_all_gather(n: int) -> list[Message]:
    """In step t every rank sends its own block to the rank t further."""
    return [Message(t, (i,), ((i + t) % n,), frozenset({(i,)})) for t in range(1, n) for i in range(n)]


def pairwise_exchange(sizes: Sizes) -> list[Message]:
    """All-to-all: every rank sends each other rank its block, nearest first by the innermost level."""
    ranks = ranks_of(sizes)
    messages = []
    offsets = sorted(ranks, key=lambda offset: tuple(reversed(offset)))
    for step, offset in enumerate(offset for offset in offsets if any(offset)):
        for rank in ranks:
            target = tuple((c + o) % size for c, o, size in zip(rank, offset, sizes, strict=True))
            messages.append(Message(step, rank, target, frozenset({(rank, target)})))
    return messages


def level_exchange(sizes: Sizes) -> list[Message]:
    """All-to-all level by level: blocks move to the target's coordinate on one level, bundled, then on the next."""
    messages = []
    step = 0
    ranks = ranks_of(sizes)
    for level, f in enumerate(sizes):
        for offset in range(1, f):
            for rank in ranks:
                target = (*rank[:level], (rank[level] + offset) % f, *rank[level + 1 :])
                blocks = frozenset(
                    (origin, goal)
                    for origin in ranks
                    for goal in ranks
                    if origin[level:] == rank[level:] and goal[: level + 1] == target[: level + 1]
                )
                messages.append(Message(step, rank, target, blocks))
            step += 1
    return messages


def bruck_exchange(n: int) -> list[Message]:
    """All-to-all in log2(n) steps: in step k the blocks move whose distance has bit k, 2^k further."""
    messages = []
    for k in range(n.bit_length() - 1):
        for i in range(n):
            blocks = set()
            for offset in (offset for offset in range(n) if offset >> k & 1):
                origin = (i - offset % 2**k) % n
                blocks.add(((origin,), ((origin + offset) % n,)))
            messages.append(Message(k, (i,), ((i + 2**k) % n,), frozenset(blocks)))
    return messages


def ring_exchange(f: int) -> list[Message]:
    """All-to-all on a ring, each block the shorter way round; halves of those to the opposite rank go each way.

    Blocks are (origin, target, turn); in step k every link carries the blocks with at least k links to go that have come k - 1.
    """
    messages = []
    for k in range(f // 2):
        for i, turn in itertools.product(range(f), (1, -1)):
            origin = (i - turn * k) % f
            blocks = frozenset(
                ((origin,), ((origin + turn * distance) % f,), turn)
                for distance in range(k + 1, f // 2 + 1)
                if turn == 1 or 2 * distance <= f
            )
            messages.append(Message(k, (i,), ((i + turn) % f,), blocks, channel=turn))
    return messages


def line_exchange(f: int) -> list[Message]:
    """All-to-all on a line: in step k every link carries the blocks of the rank k links back that go further."""
    messages = []
    for k in range(f - 1):
        for i, turn in itertools.product(range(f), (1, -1)):
            origin, target = i - turn * k, i + turn
            if 0 <= origin < f and 0 <= target < f:
                goals = range(target, f) if turn == 1 else range(target, -1, -1)
                blocks = frozenset(((origin,), (goal,)) for goal in goals)
                messages.append(Message(k, (i,), (target,), blocks, channel=turn))
    return messages


def dissemination(n: int) -> list[Message]:
    """Barrier: in step t every rank tells the one 2^t further all that it has heard."""
    messages = []
    for t in range((n - 1).bit_length()):
        for i in range(n):
            heard = frozenset(((i - j) % n,) for j in range(min(2**t, n)))
            messages.append(Message(t, (i,), ((i + 2**t) % n,), heard))
    return messages


def double_tree_reduce(n: int, chunks: int) -> list[Message]:
    """Two binary trees over ranks 1 .. n-1 under rank 0, one the mirror image of the other, each for half of the chunks."""
    messages = []
    for tree in (0, 1):
        parent = _tree_parents(n, mirrored=tree == 1)
        depth = {rank: _depth(rank, parent) for rank in parent}
        deepest = max(depth.values())
        for chunk in range(chunks):
            for rank, above in parent.items():
                step = chunk + deepest - depth[rank]
                messages.append(Message(step, (rank,), (above,), frozenset({(tree, chunk)}), combine=True))
    return sorted(messages, key=lambda m: m.step)


def _tree_parents(n: int, *, mirrored: bool) -> dict[int, int]:
    """A search tree over 1 .. n-1 whose inner ranks are even and whose root sends to rank 0; mirrored, they are odd."""
    parents: dict[int, int] = {}

    def grow(low: int, high: int, above: int) -> None:
        if low >= high:
            return
        middle = low + (1 << ((high - low).bit_length() - 1)) - 1
        parents[middle] = above
        grow(low, middle, middle)
        grow(middle + 1, high, middle)

    grow(1, n, 0)
    if not mirrored:
        return parents
    # n - rank changes odd to even where n is odd; where it is even, the next rank does.
    flip = {0: 0} | {rank: n - rank if n % 2 else rank % (n - 1) + 1 for rank in range(1, n)}
    return {flip[rank]: flip[above] for rank, above in parents.items()}


def _depth(rank: int, parent: dict[int, int]) -> int:
    return 0 if rank == 0 else 1 + _depth(parent[rank], parent)
