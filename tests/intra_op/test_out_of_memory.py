"""What the error of a step that does not fit claims: that nothing fits only where that is settled."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from autopar.intra_op import memory_limit
from autopar.intra_op.memory.model import Resident
from autopar.intra_op.memory_limit import _WORK_PER_NODE, Fits, Seen, TooLarge, _LimitSearch, choose_within_limit
from autopar.intra_op.out_of_memory import NothingFits, out_of_memory
from autopar.intra_op.tuning import Tuning
from autopar.layouts.mesh import LogicalMesh
from autopar.solver import tuning as solver_tuning
from autopar.solver.budget import Budget
from autopar.solver.outcomes import Chosen, CutOff, DoesNotFit, NotSearched, Unfinished, Unreachable
from autopar.solver.problem import ChoiceProblem, Costs, MemoryRow

MESH = LogicalMesh((2,), ("x",))


class Memory:
    """A memory model by rows: the peak of a choice is its largest row, and some bytes that the rows leave out."""

    def __init__(self, rows, unseen=lambda copy_span: 0):
        self.given, self.unseen = rows, unseen
        self.graph = SimpleNamespace(program=SimpleNamespace(equations=()))

    def rows(self, choice):
        return self.given

    def required(self, choice, *, copy_span=None):
        return int(max(row.used(choice) for row in self.given) + self.unseen(copy_span))


def fast_or_small(nodes=4):
    """Nodes that are fast and large or slow and small: 10 bytes or 1."""
    problem = ChoiceProblem(costs=Costs.of([np.array([1.0, 2.0])] * nodes, {}))
    return problem, [MemoryRow("all", {v: np.array([10.0, 1.0]) for v in range(nodes)})]


def test_a_choice_within_the_limit_is_found_and_says_what_it_costs():
    problem, rows = fast_or_small()
    found = choose_within_limit(problem, Memory(rows), 22)
    assert isinstance(found, Fits)
    assert sorted(found.choice.numbers) == [0, 0, 1, 1]
    assert (found.choice.seconds, found.unlimited_s, found.copy_span) == (6.0, 4.0, None)


def test_where_copies_take_too_much_they_are_dropped():
    problem, rows = fast_or_small()
    memory = Memory(rows, unseen=lambda copy_span: 30 if copy_span is None else 0)
    found = choose_within_limit(problem, memory, 22)
    assert isinstance(found, Fits)
    assert found.copy_span is not None


@pytest.mark.parametrize(("rival_s", "is_left"), [(4.0, True), (4.5, False)])
def test_the_search_ends_where_another_one_is_as_fast_as_the_best_without_a_limit(rival_s, is_left):
    problem, rows = fast_or_small()
    found = choose_within_limit(problem, Memory(rows), 22, rival_s=lambda: rival_s)
    assert found == CutOff(4.0) if is_left else isinstance(found, Fits)


def test_a_choice_within_the_limit_has_to_beat_what_others_have_found(monkeypatch):
    """The rival's plan gets faster on the way, and what is asked of the solver with it."""
    problem, rows = fast_or_small()
    found_s, asked = iter([9.0, 9.0, 7.0, 6.5, 6.5, 6.5, 5.0]), []

    def choose(problem, **given):
        asked.append(problem.cutoff_s)
        return ONE_SLOW

    monkeypatch.setattr(memory_limit, "choose", choose)
    choose_within_limit(problem, Memory(rows), 22, free=FREE, rival_s=lambda: next(found_s, 5.0))
    assert asked[0] == 9.0
    assert asked[-1] == 5.0
    kept = dataclasses.replace(problem, cutoff_s=4.5)
    asked.clear()
    choose_within_limit(kept, Memory(rows), 22, free=FREE)
    assert set(asked) == {4.5}


def test_the_search_ends_when_another_one_becomes_as_fast_while_it_works(monkeypatch):
    """It has asked for the best in a limit, and asks for nothing more: no other limit, and no peak of what it met."""
    problem, rows = fast_or_small()
    best_s, asked, peaks = [9.0], [], []

    def choose_slowly(problem, *, free, tried):
        asked.append(problem.limit_bytes)
        assert not problem.budget.is_over
        best_s[0] = 4.0
        assert problem.budget.is_over
        return Unfinished()

    class Watched(Memory):
        def required(self, choice, *, copy_span=None):
            peaks.append(choice)
            return super().required(choice, copy_span=copy_span)

    monkeypatch.setattr(memory_limit, "choose", choose_slowly)
    free = Chosen((0, 0, 0, 0), 4.0, 4.0)
    found = choose_within_limit(problem, Watched(rows), 22, free=free, rival_s=lambda: best_s[0])
    assert found == CutOff(4.0)
    assert (len(asked), peaks) == (1, [free.numbers])


def test_a_choice_that_is_known_to_be_too_large_stands_for_the_best():
    """Its peak is not computed again, nor is that of the best."""
    problem, rows = fast_or_small()
    peaks = []

    class Watched(Memory):
        def required(self, choice, *, copy_span=None):
            peaks.append(choice)
            return super().required(choice, copy_span=copy_span)

    memory = Watched(rows)
    seen = Seen(memory, (0, 0, 0, 1))
    assert seen.required == 31
    found = choose_within_limit(problem, memory, 22, free=FREE, seen=seen)
    assert isinstance(found, Fits)
    assert (peaks.count((0, 0, 0, 0)), peaks.count((0, 0, 0, 1))) == (0, 1)


@pytest.mark.parametrize(("unseen", "is_left"), [(30, False), (40, True)])
def test_other_ways_are_looked_at_where_a_choice_leaves_others_nothing(unseen, is_left):
    """Of what it requires above the rows others are taken to require half: 4 bytes and 20 are more than 1.02 times 23."""
    problem, rows = fast_or_small()
    memory = Memory(rows, unseen=lambda _: unseen)
    seen = Seen(memory, (0, 0, 0, 0))
    assert seen.leaves_nothing(problem, 23, Tuning()) == is_left
    found = choose_within_limit(problem, memory, 23, free=FREE, seen=seen, has_other_ways=True)
    assert (found == seen.too_large) == is_left


def test_rows_that_no_choice_keeps_settle_it():
    problem, rows = fast_or_small()
    assert choose_within_limit(problem, Memory(rows), 3) == TooLarge(40, is_settled=True)


def test_peaks_above_the_rows_do_not_settle_it():
    """The search ends after some rounds; what it met needs so much, others may need less."""
    problem, rows = fast_or_small()
    memory = Memory(rows, unseen=lambda copy_span: 30)
    found = choose_within_limit(problem, memory, 20, tuning=dataclasses.replace(Tuning(), memory_rounds=2))
    assert isinstance(found, TooLarge)
    assert not found.is_settled
    assert 30 < found.tried_bytes < 70


@pytest.mark.parametrize(("work", "is_short"), [(math.inf, False), (4 * _WORK_PER_NODE, True)])
def test_peaks_are_work_and_a_search_ends_when_its_work_is_done(work, is_short):
    """One of the choice without a limit, and then one for each of two ways to keep copies."""
    problem, rows = fast_or_small()
    looks = []
    memory = Memory(rows, unseen=lambda copy_span: looks.append(copy_span) or 30)
    found = choose_within_limit(dataclasses.replace(problem, budget=Budget(work=work)), memory, 20)
    assert isinstance(found, TooLarge)
    assert not found.is_settled
    assert (len(looks) == 3) == is_short


def choose_in_turn(monkeypatch, *outcomes):
    """The solver has these outcomes, one after the other; the list of the limits of rows that it is asked for."""
    asked, left = [], iter(outcomes)

    def choose(problem, **given):
        asked.append(problem.limit_bytes)
        return next(left)

    monkeypatch.setattr(memory_limit, "choose", choose)
    return asked


FREE = Chosen((0, 0, 0, 0), 4.0, 4.0)
ONE_SLOW, ALL_SLOW = Chosen((0, 0, 0, 1), 5.0, 4.0), Chosen((1, 1, 1, 1), 8.0, 4.0)


def test_a_choice_that_fits_with_its_copies_dropped_is_taken_at_once(monkeypatch):
    problem, rows = fast_or_small()
    memory = Memory(rows, unseen=lambda copy_span: 30 if copy_span is None else 0)
    asked = choose_in_turn(monkeypatch, ONE_SLOW)
    found = choose_within_limit(problem, memory, 32, free=FREE)
    assert isinstance(found, Fits)
    assert (found.choice, len(asked)) == (ONE_SLOW, 1)
    assert found.copy_span is not None


@pytest.mark.parametrize("ended", [CutOff(9.0), NotSearched(9.0), Unfinished(), DoesNotFit(2.0)])
def test_what_ends_the_search_below_the_limit_of_rows_says_nothing_of_the_limit(monkeypatch, ended):
    """What is left there is too slow or nothing, but what is faster than that may fit."""
    problem, rows = fast_or_small()
    asked = choose_in_turn(monkeypatch, ONE_SLOW, ended, ALL_SLOW)
    found = choose_within_limit(problem, Memory(rows, unseen=lambda copy_span: 5), 32, free=FREE)
    assert isinstance(found, Fits)
    assert found.choice == ALL_SLOW
    first, lower, between = asked
    assert first == 32
    assert between == (lower + first) / 2


def test_no_limit_of_rows_is_tried_below_what_is_known_to_be_needed(monkeypatch):
    problem, rows = fast_or_small()
    asked = choose_in_turn(monkeypatch, ONE_SLOW, DoesNotFit(26.5), ALL_SLOW)
    choose_within_limit(problem, Memory(rows, unseen=lambda copy_span: 5), 31, free=FREE)
    assert asked[1] < 26.5
    assert asked[2] == (26.5 + 31) / 2


@pytest.mark.parametrize("has_other_ways", [True, False])
@pytest.mark.parametrize(("least", "is_hopeless"), [(30.0, False), (30.5, True)])
def test_the_search_ends_where_what_all_need_leaves_no_room_for_half_of_what_peaks_have_above_it(
    monkeypatch, least, is_hopeless, has_other_ways
):
    """Of two percent above 32 a choice that needs 30.5 by the rows leaves 2.1, and one that was met has 5 above them.

    One that needs less may have less above them than the few that were met: a Wide-ResNet on 8 V100s was left in 24 microbatches
    after one such choice, and is 5 % slower in 32. Where there is no other way to run the step, nothing is left.
    """
    problem, rows = fast_or_small()
    asked = choose_in_turn(monkeypatch, ONE_SLOW, DoesNotFit(least), ALL_SLOW)
    found = choose_within_limit(
        problem, Memory(rows, unseen=lambda copy_span: 5), 32, free=FREE, has_other_ways=has_other_ways
    )
    is_left = is_hopeless and has_other_ways
    assert (found == TooLarge(36, is_settled=False)) == is_left
    assert len(asked) == (2 if is_left else 3)


@pytest.mark.parametrize("has_other_ways", [True, False])
@pytest.mark.parametrize(("unseen", "is_hopeless"), [(36, False), (38, True)])
def test_a_way_is_left_where_half_of_what_the_rows_leave_out_of_the_fastest_is_too_much_for_all(
    monkeypatch, unseen, is_hopeless, has_other_ways
):
    """All need 4 by the rows at least, and the limit is 22."""
    problem, rows = fast_or_small()
    asked = choose_in_turn(monkeypatch, DoesNotFit(23.0))
    found = choose_within_limit(
        problem, Memory(rows, unseen=lambda copy_span: unseen), 22, free=FREE, has_other_ways=has_other_ways
    )
    assert isinstance(found, TooLarge)
    assert found.is_settled == bool(asked)
    assert (not asked) == (is_hopeless and has_other_ways)


@pytest.mark.parametrize(
    ("dropped", "has_other_ways", "spans"),
    [(5, True, ["short"]), (5, False, [None, "short"]), (30, True, [None]), (30, False, [None, "short"])],
)
def test_where_there_are_other_ways_copies_are_kept_as_was_leanest_for_the_first_that_did_not_fit(
    monkeypatch, dropped, has_other_ways, spans
):
    """Copies that are dropped may take more memory too, as what is gathered again waits for something."""
    problem, rows = fast_or_small()
    asked = []
    memory = Memory(rows, unseen=lambda copy_span: asked.append(copy_span) or (dropped if copy_span else 20))
    choose_in_turn(
        monkeypatch, ONE_SLOW, Chosen((0, 0, 1, 0), 5.0, 4.0), DoesNotFit(30.0), DoesNotFit(30.0), CutOff(9.0)
    )
    choose_within_limit(
        problem,
        memory,
        32,
        free=FREE,
        has_other_ways=has_other_ways,
        tuning=dataclasses.replace(Tuning(), memory_rounds=2),
    )
    assert [span and "short" for span in asked[1:3]] == [None, "short"]
    assert [span and "short" for span in asked[3 : 3 + len(spans)]] == spans


def test_the_first_end_of_the_search_is_handed_on(monkeypatch):
    problem, rows = fast_or_small()
    choose_in_turn(monkeypatch, CutOff(9.0))
    assert choose_within_limit(problem, Memory(rows), 32, free=FREE) == CutOff(9.0)


def test_a_choice_that_is_too_large_by_what_the_rows_leave_out_is_not_found_again():
    """What is fast takes much more than the rows say, which are far below the limit."""
    problem, rows = fast_or_small()

    class Much(Memory):
        def required(self, choice, *, copy_span=None):
            return super().required(choice) + (0 if all(choice) else 2000)

    found = choose_within_limit(problem, Much(rows), 1000)
    assert isinstance(found, Fits)
    assert found.choice.numbers == (1, 1, 1, 1)


def test_a_choice_met_on_the_way_that_fits_is_taken_where_the_search_ends_without_one():
    """The rows say 12 too much of the choice that is half slow, and too little of every other."""
    problem, rows = fast_or_small()

    class Odd(Memory):
        def required(self, choice, *, copy_span=None):
            return super().required(choice) + (-12 if sorted(choice) == [0, 0, 1, 1] else 30)

    met = [(0, 0, 1, 1), (0, 1, 1, 1)]
    search = _LimitSearch(
        problem=problem,
        free=Chosen((0, 0, 0, 0), 4.0, 4.0),
        memory=Odd(rows),
        limit_bytes=12,
        highest_bytes=12,
        _met=dict.fromkeys(met),
    )
    assert search.find_met((None,)) == Fits(Chosen(met[0], 6.0, 4.0, tuple(met)), None, 4.0)
    assert dataclasses.replace(search, limit_bytes=9).find_met((None,)) is None
    cut = dataclasses.replace(search, problem=dataclasses.replace(problem, cutoff_s=6.0))
    assert cut.find_met((None,)) is None
    known = dataclasses.replace(search, problem=dataclasses.replace(problem, rows=tuple(rows)), _above_rows=[30.0])
    assert known.find_met((None,)) is None, "it would have to be unlike all others"
    assert dataclasses.replace(known, _above_rows=[30.0, -12.0]).find_met((None,)) is not None


def test_an_integer_program_that_ends_early_does_not_settle_it():
    """Subsets of one exact size fit, which a single node of branch and bound does not find."""
    random = np.random.default_rng(0)
    sizes = random.integers(1_000, 10_000, 24).astype(float)
    limit = float(sizes[random.permutation(24)[:12]].sum())
    rows = [
        MemoryRow("taken", {v: np.array([0.0, size]) for v, size in enumerate(sizes)}),
        MemoryRow("left", {v: np.array([size, 0.0]) for v, size in enumerate(sizes)}, 2 * limit - sizes.sum()),
    ]
    tuning = dataclasses.replace(solver_tuning.Tuning(), memory_nodes=1)
    costs = Costs.of([random.uniform(0, 1, 2) for _ in range(24)], {})
    found = choose_within_limit(ChoiceProblem(costs=costs, tuning=tuning), Memory(rows), int(limit))
    assert isinstance(found, TooLarge)
    assert not found.is_settled


def test_other_ends_of_the_search_are_handed_on():
    problem, rows = fast_or_small()
    assert choose_within_limit(dataclasses.replace(problem, cutoff_s=3.0), Memory(rows), None) == CutOff(4.0)
    never = ChoiceProblem(costs=Costs.of([np.array([np.inf, np.inf])], {}))
    assert choose_within_limit(never, Memory(rows), None) == Unreachable()


@pytest.mark.parametrize(
    ("settled", "begin", "end"),
    [
        (
            True,
            "no plan fits 10.0 KiB per device on 2 devices: on mesh (2,)",
            "with room for 18% more temporaries than predicted, which XLA may need; the least that a plan was found to need is",
        ),
        (False, "no plan was found that fits 10.0 KiB per device", "the search ended before it had tried every plan"),
    ],
)
def test_the_error_claims_that_nothing_fits_only_where_that_is_settled(settled, begin, end):
    failures = [
        NothingFits(mesh=MESH, bound_bytes=8_000, tried_bytes=20_000, tensors=(), is_settled=settled),
        NothingFits(mesh=MESH, bound_bytes=12_000, tried_bytes=None, tensors=(), is_settled=True),
    ]
    error = out_of_memory(failures, memory_limit_bytes=10_240, is_constrained=False)
    assert str(error).startswith(begin)
    assert end in str(error)
    assert error.needed_bytes == 20_000


def test_the_error_lists_equal_tensors_once_with_their_number_those_first_that_take_most_together():
    def resident(name, shape, size):
        return Resident(name=f"{name} {shape}", shape=shape, dtype="float32", bytes=size, is_kept=False)

    tensors = (resident("large", (7,), 2**20), *[resident("exp", (4, 8), 2**19)] * 24, resident("exp", (2, 8), 2**10))
    failure = NothingFits(mesh=MESH, bound_bytes=8_000, tried_bytes=None, tensors=tensors, is_settled=True)
    error = out_of_memory([failure], memory_limit_bytes=10_240, is_constrained=False)
    listed = ["24 x 512.0 KiB  exp  float32[4, 8]", "1.0 MiB  large  float32[7]", "1.0 KiB  exp  float32[2, 8]"]
    lines = str(error).splitlines()
    assert [line.strip() for line in lines[1:4]] == listed
    assert lines[4].startswith("Ways out: ")
    assert error.tensors == tuple(listed)
