"""A collective played message by message: every link and port is a resource, every message waits for the data it carries.

In: the steps of an algorithm (`message_plans`) and a network that says which resources a message holds and for how long. Out:
the seconds until the last message has arrived, and what every rank then holds, so that a test sees that the algorithm is the
collective and that its closed form is its time. A message holds its resources for latency + bytes / bandwidth. What can go
wrong: a plan that adds a contribution twice; that is a ValueError here, as it would be a wrong sum in a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

Rank = tuple[int, ...]
Block = Hashable
Contents = dict[Rank, dict[Block, frozenset[Rank]]]
"""Per rank and block, the ranks whose contributions it holds."""


@dataclasses.dataclass(frozen=True)
class Message:
    """Blocks on their way from one rank to another in one step of an algorithm.

    `combine`: the target adds them to its own (a sum); otherwise it takes them as they are. `channel` names the link where
    a network has several between the two.
    """

    step: int
    source: Rank
    target: Rank
    blocks: frozenset[Block]
    combine: bool = False
    channel: Hashable = None


@dataclasses.dataclass(frozen=True)
class Route:
    """What a message holds while it travels, and its cost."""

    resources: tuple[Hashable, ...]
    latency_s: float
    s_per_byte: float


@dataclasses.dataclass(frozen=True)
class Played:
    """The end of a collective: when, and what each rank holds."""

    seconds: float
    contents: Contents


def play(
    messages: Sequence[Message],
    contents: Contents,
    *,
    route: Callable[[Message], Route],
    block_bytes: Mapping[Block, float],
) -> Played:
    """Run the messages: each starts when its data has arrived and its resources are free, the earliest first."""
    waits_for = _dependencies(messages)
    routes = [route(message) for message in messages]
    free: dict[Hashable, float] = {}
    done: dict[int, float] = {}
    held = {rank: dict(blocks) for rank, blocks in contents.items()}
    followers: dict[int, list[int]] = {}
    missing = [len(others) for others in waits_for]
    for number, others in enumerate(waits_for):
        for other in others:
            followers.setdefault(other, []).append(number)

    def start(number: int) -> float:
        arrived = max((done[other] for other in waits_for[number]), default=0.0)
        return max([arrived, *(free.get(resource, 0.0) for resource in routes[number].resources)])

    ready = {number for number, count in enumerate(missing) if count == 0}
    while ready:
        number = min(ready, key=lambda n: (start(n), messages[n].step, n))
        message, path = messages[number], routes[number]
        size = sum(block_bytes[block] for block in message.blocks)
        done[number] = start(number) + path.latency_s + path.s_per_byte * size
        free.update(dict.fromkeys(path.resources, done[number]))
        _deliver(message, held)
        ready.remove(number)
        for follower in followers.get(number, ()):
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.add(follower)
    return Played(max(done.values(), default=0.0), held)


def _dependencies(messages: Sequence[Message]) -> list[list[int]]:
    """For each message the earlier ones that brought its source any of the blocks it carries."""
    arrivals: dict[tuple[Rank, Block], list[int]] = {}
    for number, message in enumerate(messages):
        for block in message.blocks:
            arrivals.setdefault((message.target, block), []).append(number)
    return [
        sorted(
            {
                other
                for block in message.blocks
                for other in arrivals.get((message.source, block), ())
                if messages[other].step < message.step
            }
        )
        for message in messages
    ]


def _deliver(message: Message, held: Contents) -> None:
    for block in message.blocks:
        given = held[message.source][block]
        own = held[message.target].get(block, frozenset())
        if message.combine and given & own:
            raise ValueError(
                f"step {message.step} adds block {block!r} of {sorted(given & own)} at {message.target} twice"
            )
        held[message.target][block] = given | own if message.combine else given


def holding_own_terms(ranks: Iterable[Rank], blocks: Iterable[Block]) -> Contents:
    """Before a reduction: every rank holds its own contribution to every block."""
    listed = list(blocks)
    return {rank: dict.fromkeys(listed, frozenset({rank})) for rank in ranks}


def holding(ranks: Iterable[Rank], owner: Mapping[Block, Rank]) -> Contents:
    """Before a gather or an exchange: each block is at one rank."""
    contents: Contents = {rank: {} for rank in ranks}
    for block, rank in owner.items():
        contents[rank][block] = frozenset({rank})
    return contents
