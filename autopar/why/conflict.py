"""Why nothing fits the memory: the smallest set of wishes that leave no plan, and what giving each of them up would cost.

In: the settings and the traced step for which no plan was found, the error, and how long to look. Out: `Conflict`. A wish is a
constraint, a preset, or an argument that the user gave and that could be left open. Wishes conflict if no plan fits that keeps
them all, whatever the others say. All wishes together conflict, as the error says; from there each is left out where the others
still do. That is an answer at any time, and one from which no wish can be left out if there was time for all. Other wishes may
conflict too, and then giving up one is not enough: two are tried, and then as many as are needed. Each relaxation is tried, and
its price is that of the plan found. What needs no search comes first: state that exceeds all devices together, sets of which more
is known already. No search takes more than its share of the time, so that all have some; one whose share was too short is made
again if time is left. A search that the clock has ended without a plan says nothing: there was no time to try. What can go wrong:
a search that ends by itself before it has found the plan there is; a relaxation is then said to be not enough.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from autopar.errors import OutOfMemoryError
from autopar.explain.units import bytes_text
from autopar.inter_op.attempts import bytes_held
from autopar.inter_op.one_mesh import state_is_too_large
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.program.step import TracedStep
from autopar.progress import enter
from autopar.settings import Settings, count_devices, make_request, most_devices
from autopar.solver.budget import Budget
from autopar.why.deadline import Deadline
from autopar.why.question import OUT_OF_TIME, solve
from autopar.why.wishes import Wish, wishes_of

BUDGET_S = 60.0
"""How long to look where nobody says it and planning has no limit."""
_SEARCH = 0.8
"""Of a search's share of the time, for finding plans; in the rest it describes the one that it has."""
_TIMES_STATE = (1.5, 3.0)
"""Limits to try where the state alone is too large, as multiples of what it takes on a device."""
_ROOM = 1.25
"""A limit above a plan's own peak by this factor has room for what XLA may need beyond the prediction."""
_FOR_WISHES = 0.6
"""Of the time, for finding what conflicts; the rest is for prices."""
_ROUNDS = 4
"""How often to come back to searches whose share of the time was too short; at last, one may have all that is left."""
_LONGER = 1.5
"""A search is made again if its share is longer than before by this factor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relaxation:
    """Something to give up: in words, and the plan there is then; None if that alone is not enough.

    `is_tried`: whether there was time for it. `ended_early`: whether the clock ended the search for its plan.
    """

    words: str
    step_s: float | None = None
    peak_bytes: int | None = None
    is_tried: bool = True
    ended_early: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conflict:
    """Why nothing fits.

    Attributes:
        limit_bytes: the memory limit per device.
        wishes: the wishes that leave no plan within it; none if no plan fits whatever is given up.
        tensors: the largest that are alive together, in words.
        relaxations: what was tried, the fastest plan first.
        is_smallest: whether no wish can be left out; else the clock ended before all were tried.
        is_settled: whether no plan fits; else none was found, and the search ended before it had tried all that may.
        state_bytes: of the state on each device, if it is spread evenly over all of them; no plan takes less.
    """

    limit_bytes: int
    wishes: tuple[str, ...]
    tensors: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]
    is_smallest: bool = True
    is_settled: bool = True
    state_bytes: int = 0


def find_conflict(settings: Settings, traced: TracedStep, error: OutOfMemoryError, deadline: Deadline) -> Conflict:
    """The conflict of a step that fits no memory, and the cheapest ways out.

    Args:
        settings: under which nothing was found.
        traced: the step.
        error: that says so.
        deadline: until when to look.
    """
    tries, limit = _Tries(settings, traced, deadline), _limit_of(settings)
    for number in range(_ROUNDS):
        tries.is_last = number == _ROUNDS - 1
        wishes, is_smallest = _conflicting(tries, deadline.clock.part(_FOR_WISHES))
        relaxations = _ways_out(tries, wishes, error)
        if deadline.clock.is_late or (is_smallest and all(one.is_tried for one in relaxations)):
            break
    return Conflict(
        limit_bytes=limit,
        wishes=tuple(wish.words for wish in wishes),
        tensors=error.tensors,
        relaxations=tuple(
            sorted(relaxations, key=lambda one: (one.step_s is None, not one.is_tried, one.step_s or 0.0))
        ),
        is_smallest=is_smallest,
        is_settled=error.is_settled,
        state_bytes=math.ceil(_state_bytes(traced, settings)),
    )


class _Tries:
    """Searches under one clock, `ahead` of them still to be made, or only one if it `is_last`; what they found is kept."""

    def __init__(self, settings: Settings, traced: TracedStep, deadline: Deadline) -> None:
        self.settings, self.traced, self.deadline = settings, traced, deadline
        self.every = wishes_of(settings)
        self.ahead = 1
        self._known: dict[str, Plan | PipelinePlan | str] = {}
        self._shares: dict[str, float] = {}
        self._enough: list[frozenset[str]] = []
        self._not_enough: list[frozenset[str]] = []
        self.is_last = False

    def knows(self, given_up: Sequence[Wish]) -> bool:
        """Whether it is known what there is without some wishes."""
        return _without_text(self._ordered(given_up)) in self._known or self._is_not_enough(given_up)

    def without(self, given_up: Sequence[Wish]) -> Plan | PipelinePlan | str | None:
        """The plan without some wishes, or why there is none; None if there is no time.

        Where it is not enough to give up more, no search is needed.
        """
        if self._is_not_enough(given_up):
            return "not enough, as more is not enough"
        ordered, settings = self._ordered(given_up), self.settings
        for wish in ordered:
            settings = wish.given_up(settings)
        found = self.plan(_without_text(ordered), settings)
        if found is not None:
            told = self._not_enough if isinstance(found, str) else self._enough
            told.append(frozenset(wish.words for wish in ordered))
        return found

    def is_enough(self, given_up: Sequence[Wish]) -> bool:
        """Whether there is known to be a plan without these, as there is one without fewer."""
        words = {wish.words for wish in given_up}
        return any(fewer <= words for fewer in self._enough)

    def plan(self, words: str, settings: Settings) -> Plan | PipelinePlan | str | None:
        """The plan under some settings, or why there is none; None if there is no time. It is sought until that is known."""
        if words not in self._known:
            found = self._search(words, settings)
            if found is None:
                return None
            self._known[words] = found
        return self._known[words]

    def _search(self, words: str, settings: Settings) -> Plan | PipelinePlan | str | None:
        """What there is, by a search in its share of the time, if need be."""
        devices = count_devices(settings)
        if state_is_too_large(self.traced, make_request(settings), devices):
            return f"the state alone is more than {devices} devices hold"
        clock = self.deadline.clock
        if clock.is_late:
            return None
        share_s = clock.seconds_left / (1 if self.is_last else max(1, self.ahead))
        self.ahead -= 1
        if share_s < _LONGER * self._shares.get(words, 0.0):
            return None
        self._shares[words] = share_s
        enter(f"why nothing fits: {words}")
        most_s = min(settings.planning_seconds or share_s, _SEARCH * share_s)
        asked = dataclasses.replace(settings, planning_seconds=most_s)
        found = self.deadline.run(lambda: solve(asked, self.traced), share_s)
        return None if found == OUT_OF_TIME else found

    def _is_not_enough(self, given_up: Sequence[Wish]) -> bool:
        """Whether there is no plan without these, nor without more."""
        words = {wish.words for wish in given_up}
        return any(words <= more for more in self._not_enough)

    def _ordered(self, given_up: Sequence[Wish]) -> list[Wish]:
        return [wish for wish in self.every if wish in given_up]

    def price(self, words: str, settings: Settings) -> Relaxation:
        """A relaxation with the plan there is."""
        return _of_plan(words, self.plan(words, settings))


def _conflicting(tries: _Tries, clock: Budget) -> tuple[list[Wish], bool]:
    """Wishes that leave no plan, the others given up, and whether none of them can be left out."""
    every = tries.every
    tries.ahead = 2 + 2 * len(every)
    is_free = _leaves_plan(tries, ()) if every else False
    if is_free is False:
        return [], True
    kept, is_smallest = list(every), is_free is True
    for wish in every if len(every) > 1 else ():
        fewer = [one for one in kept if one is not wish]
        found = None if clock.is_late else is_free if not fewer else _leaves_plan(tries, fewer)
        is_smallest = is_smallest and found is not None
        kept = fewer if found is False else kept
    return kept, is_smallest


def _leaves_plan(tries: _Tries, kept: Sequence[Wish]) -> bool | None:
    """Whether there is a plan that keeps some of the wishes; None if there is no time to find out."""
    given_up = [wish for wish in tries.every if wish not in kept]
    found = tries.without(given_up) if not tries.is_enough(given_up) else True
    return None if found is None else not isinstance(found, str)


def _ways_out(tries: _Tries, wishes: Sequence[Wish], error: OutOfMemoryError) -> list[Relaxation]:
    """What to give up, or to add, each with its plan; more wishes than one only where none of them is enough."""
    settings = tries.settings
    more_devices = isinstance(settings.devices, int) and settings.meshes == "auto"
    more_devices = more_devices and 2 * count_devices(settings) <= most_devices(settings)
    tries.ahead = 1 + sum(not tries.knows([wish]) for wish in wishes) + more_devices
    found = [_of_plan(_without_text([wish]), tries.without([wish])) for wish in wishes]
    found.append(_with_more_memory(tries, error))
    if more_devices:
        found.append(tries.price(f"devices={2 * count_devices(settings)}", _on_more_devices(settings)))
    singles = found[: len(wishes)]
    if wishes and len(tries.every) > 1 and all(one.step_s is None and one.is_tried for one in singles):
        found += _without_several(tries, wishes)
    return found


def _without_several(tries: _Tries, wishes: Sequence[Wish]) -> list[Relaxation]:
    """Ways out where one of the wishes is not enough: two, or else as many as are needed; those that are not enough are left out.

    A way out gives up at least one of the wishes that conflict.
    """
    pairs = [pair for pair in itertools.combinations(tries.every, 2) if any(wish in wishes for wish in pair)]
    found = _tried(tries, pairs)
    if len(tries.every) > 2 and all(one.step_s is None and one.is_tried for one in found):
        found += _tried(tries, [_needed(tries)])
    return [one for one in found if one.step_s is not None or not one.is_tried]


def _tried(tries: _Tries, sets: Sequence[Sequence[Wish]]) -> list[Relaxation]:
    tries.ahead = sum(not tries.knows(one) for one in sets)
    return [_of_plan(_without_text(one), tries.without(one)) for one in sets]


def _needed(tries: _Tries) -> Sequence[Wish]:
    """Wishes that are enough if they are given up together; each is needed, as far as there was time to try."""
    given_up = tries.every
    tries.ahead = 1 + len(given_up)
    for wish in tries.every:
        fewer = [one for one in given_up if one is not wish]
        if fewer and (tries.is_enough(fewer) or not isinstance(tries.without(fewer), str | None)):
            given_up = fewer
    return given_up


def _with_more_memory(tries: _Tries, error: OutOfMemoryError) -> Relaxation:
    """The lowest limit that is known to do, or a low one that does, or one that does for the fastest plan without a limit."""
    settings, known = tries.settings, error.needed_bytes
    for needed in _low_limits(tries) if known is None else (known,):
        words = f"memory_limit_bytes={needed:_} ({bytes_text(needed)} per device)"
        found = tries.price(words, dataclasses.replace(settings, memory_limit_bytes=needed))
        if known is not None or found.step_s is not None or not found.is_tried:
            return found
    free = tries.plan("without a memory limit", dataclasses.replace(settings, memory_limit_bytes=2**60))
    if free is None or isinstance(free, str):
        return _of_plan("a higher memory_limit_bytes", free)
    needed = int(_ROOM * free.peak_bytes)
    return _of_plan(f"memory_limit_bytes={needed:_} ({bytes_text(needed)} per device)", free)


def _low_limits(tries: _Tries) -> tuple[int, ...]:
    """Limits to try where the state alone is too large: the fastest plan without a limit may take far more than is needed."""
    state = _state_bytes(tries.traced, tries.settings)
    return tuple(int(times * state) for times in _TIMES_STATE) if state > _limit_of(tries.settings) else ()


def _state_bytes(traced: TracedStep, settings: Settings) -> float:
    """Of the state on each device, if it is spread evenly over all of them."""
    return bytes_held(leaf for leaf in traced.inputs if leaf.role != "batch") / count_devices(settings)


def _limit_of(settings: Settings) -> int:
    return make_request(settings).memory_limit_bytes or 0


def _on_more_devices(settings: Settings) -> Settings:
    assert isinstance(settings.devices, int)
    limit = make_request(settings).memory_limit_bytes
    return dataclasses.replace(settings, devices=2 * settings.devices, memory_limit_bytes=limit)


def _of_plan(words: str, plan: Plan | PipelinePlan | str | None) -> Relaxation:
    if plan is None or isinstance(plan, str):
        return Relaxation(words=words, is_tried=plan is not None)
    return Relaxation(words=words, step_s=plan.step_s, peak_bytes=plan.peak_bytes, ended_early=plan.ended_early)


def _without_text(given_up: Sequence[Wish]) -> str:
    return f"without {' and '.join(wish.words for wish in given_up)}"
