"""Why nothing fits: the wishes that are named leave no plan, each of them is needed for that, and each way out has its price."""

import contextlib
import signal
import time

import jax
import pytest

import autopar
from autopar.__main__ import main
from autopar.commands.arguments.in_flags import in_flags
from autopar.errors import ArgumentError, OutOfMemoryError, PlanError
from autopar.progress import listening
from autopar.why import conflict
from autopar.why.deadline import Deadline, nothing_found
from autopar.why.question import OUT_OF_TIME, solve
from autopar.why.report import WhyNot
from tests.why.test_leaf import SETTINGS, shapes, train_step

WHOLE = {"state/params/*": autopar.Replicated()}


def plan(**changes):
    return autopar.parallelize(train_step, **{**SETTINGS, **changes}).plan(*shapes())


def conflict_of(**changes):
    with pytest.raises(OutOfMemoryError) as caught:
        plan(**changes)
    return caught.value.conflict(budget_s=900.0)


def prices(answer) -> dict[str, float | None]:
    return {one.words: one.step_s for one in answer.answer.relaxations}


def test_the_constraint_that_leaves_no_plan_is_named_and_the_one_that_does_not_matter_is_not():
    given = {"mesh_shape": (4,), "num_microbatches": 1, "recompute": "none"}
    innocent = {"batch/y": autopar.Replicated()}
    with pytest.raises(OutOfMemoryError) as caught:
        plan(**given, constraints=[WHOLE, innocent], memory_limit_bytes=2000)
    least = plan(**given, constraints=innocent, memory_limit_bytes=2**40)
    assert caught.value.needed_bytes is None or caught.value.needed_bytes > 2000
    limit = int(least.peak_bytes * 1.3)
    answer = conflict_of(**given, constraints=[WHOLE, innocent], memory_limit_bytes=limit)
    (wish,) = answer.answer.wishes
    assert wish == "the constraint 'state/params/*': Replicated(axes=None)"
    found = prices(answer)
    without = plan(**given, constraints=innocent, memory_limit_bytes=limit)
    assert found[f"without {wish}"] == pytest.approx(without.step_s, rel=1e-9)
    (memory,) = (words for words in found if words.startswith("memory_limit_bytes="))
    more = int(memory.partition("=")[2].partition(" ")[0].replace("_", ""))
    granted = plan(**given, constraints=[WHOLE, innocent], memory_limit_bytes=more)
    assert found[memory] == pytest.approx(granted.step_s, rel=1e-9)
    assert f"No plan fits {limit / 1024:.1f} KiB per device and keeps:\n  {wish}" in str(answer)
    assert "state/params/layer_*/up" in str(answer)


@pytest.mark.slow
def test_two_wishes_conflict_that_could_each_be_kept():
    """Half of the parameters may be whole, whichever, and not all of them."""
    given = {"mesh_shape": (4,), "num_microbatches": 1, "recompute": "none"}
    halves = [{f"state/params/*/{name}": autopar.Replicated()} for name in ("up", "down")]
    one = max(plan(**given, constraints=half).peak_bytes for half in halves)
    limit = (one + plan(**given, constraints=halves).peak_bytes) // 2
    answer = conflict_of(**given, constraints=halves, memory_limit_bytes=limit)
    names = [f"the constraint 'state/params/*/{name}': Replicated(axes=None)" for name in ("up", "down")]
    wishes = answer.answer.wishes
    assert wishes[:2] == tuple(names)

    def keep(kept):
        """The plan of a step that keeps these wishes alone."""
        fixed = {name: value for name, value in given.items() if any(one.startswith(f"{name}=") for one in kept)}
        half = [one for name, one in zip(names, halves, strict=True) if name in kept]
        return plan(**fixed, constraints=half, memory_limit_bytes=limit)

    with pytest.raises(OutOfMemoryError):
        keep(wishes)
    for wish in wishes:
        assert keep([one for one in wishes if one != wish]).peak_bytes <= limit, wish
    found = prices(answer)
    for name, other in zip(names, reversed(halves), strict=True):
        granted = plan(**given, constraints=other, memory_limit_bytes=limit)
        assert found[f"without {name}"] == pytest.approx(granted.step_s, rel=1e-9)


def test_where_no_wish_is_to_blame_more_devices_and_more_memory_are_tried():
    answer = conflict_of(memory_limit_bytes=20_000)
    assert answer.answer.wishes == ()
    assert "No plan fits 19.5 KiB per device, whatever is given up." in str(answer)
    assert answer.answer.state_bytes == 2 * 2 * 64 * 256 * 4 // 4, "the parameters of two layers on four devices"
    assert "The state alone takes 64.0 KiB per device, spread evenly over all; gradients," in str(answer)
    found = prices(answer)
    assert "devices=8" in found
    (memory,) = (words for words in found if words.startswith("memory_limit_bytes="))
    assert found[memory] is not None
    if found["devices=8"] is None:
        assert "not enough" in str(answer)


@pytest.mark.sweep
def test_a_preset_is_one_wish_and_the_command_line_names_its_flag():
    given = {"mesh_shape": (4,), "num_microbatches": 1, "recompute": "none"}
    limit = int(1.3 * plan(**given).peak_bytes)
    answer = conflict_of(**given, constraints=autopar.data_parallel(), memory_limit_bytes=limit)
    assert answer.answer.wishes == ("data_parallel()",)
    words = ("without zero2()", "mesh_shape=[(2, 4)]", "memory_limit_bytes=2_000 (2.0 KiB per device)", "devices=8")
    assert [in_flags(one) for one in words] == [
        "without --zero 2",
        "--mesh 2,4",
        "--memory-limit 2KiB (2.0 KiB per device)",
        "--devices 8",
    ]
    assert in_flags("data_parallel()") == "--data-parallel"
    assert in_flags("recompute='layer'") == "--recompute layer"
    assert in_flags("collectives=['all-reduce', 'all-gather']") == "--collectives all-reduce,all-gather"
    assert in_flags("the constraint 'a': Split(axes=None)") == "the constraint 'a': Split(axes=None)"


def test_without_time_all_wishes_are_the_answer_and_nothing_is_tried():
    given = {"mesh_shape": (4,), "num_microbatches": 1, "recompute": "none"}
    with pytest.raises(OutOfMemoryError) as caught:
        plan(**given, constraints=WHOLE, memory_limit_bytes=100_000)
    answer = caught.value.conflict(budget_s=1e-9)
    assert len(answer.answer.wishes) == 4
    assert not answer.answer.is_smallest
    assert not any(one.is_tried for one in answer.answer.relaxations)
    assert "There was no time to find out whether fewer of these conflict." in str(answer)
    assert "no time to try" in str(answer)
    assert str(answer).endswith("\nMore planning seconds would try what there was no time for.")


def test_state_that_exceeds_all_devices_needs_no_search_to_say_so(monkeypatch):
    with pytest.raises(OutOfMemoryError) as caught:
        plan(constraints=WHOLE, memory_limit_bytes=1000)
    asked = []
    monkeypatch.setattr(conflict, "solve", lambda settings, traced: asked.append(settings) or "does not fit the memory")
    answer = caught.value.conflict()
    assert answer.answer.wishes == ()
    assert answer.answer.is_smallest
    assert all(settings.memory_limit_bytes != 1000 for settings in asked)


@pytest.mark.parametrize("preset", [(), autopar.data_parallel()])
def test_every_search_has_a_share_of_the_time_and_none_is_made_twice(monkeypatch, preset):
    given = {"mesh_shape": (4,), "num_microbatches": 1, "recompute": "none"}
    limit = int(1.3 * plan(**given).peak_bytes)
    with pytest.raises(OutOfMemoryError) as caught:
        plan(constraints=[autopar.data_parallel(), *([WHOLE] if preset == () else [])], memory_limit_bytes=limit // 4)
    asked, free = [], plan(**given)
    monkeypatch.setattr(conflict, "solve", lambda settings, traced: asked.append(settings) or free)
    answer = caught.value.conflict(budget_s=60.0)
    assert answer.answer.is_smallest
    assert all(one.is_tried and one.step_s == free.step_s for one in answer.answer.relaxations)
    shares = [settings.planning_seconds for settings in asked]
    assert all(share * (len(shares) - number) <= 60.0 for number, share in enumerate(shares)), shares
    assert len({(str(one.constraints), one.memory_limit_bytes, one.devices) for one in asked}) == len(asked)


def test_each_kind_of_tensors_is_a_line():
    told = conflict.Conflict(limit_bytes=1, wishes=(), tensors=("4 x 1.0 GiB  exp", "3 B  x"), relaxations=())
    assert "\n  4 x 1.0 GiB  exp\n  3 B  x\n" in str(WhyNot(told))


def interrupted(settings, traced):
    raise KeyboardInterrupt


def endless(settings, traced):
    """A search that never looks at its clock, and that no error of its own ends."""
    while True:
        with contextlib.suppress(Exception):
            time.sleep(1.0)


def out_of_time(settings, traced):
    """A search that the clock ends before it has found a plan."""
    return OUT_OF_TIME


@pytest.mark.parametrize("search", [interrupted, endless, out_of_time])
def test_a_search_that_is_left_says_nothing_and_the_answer_is_what_was_found_so_far(search, monkeypatch):
    with pytest.raises(OutOfMemoryError) as caught:
        plan(mesh_shape=(4,), constraints=WHOLE, memory_limit_bytes=100_000)
    monkeypatch.setattr(conflict, "solve", search)
    answer = caught.value.conflict(budget_s=0.5)
    assert len(answer.answer.wishes) == 2
    assert not answer.answer.is_smallest
    assert not any(one.is_tried for one in answer.answer.relaxations)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_alarm_that_rings_where_nothing_can_be_left_rings_again(capsys):
    class Slow:
        def __del__(self):
            time.sleep(0.3)

    def search():
        one = Slow()
        del one
        return endless(None, None)

    assert Deadline(60.0).run(search, 0.1) is None
    assert capsys.readouterr().err == ""


def test_an_alarm_of_the_callers_is_left_alone():
    rings = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rings.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        deadline = Deadline(0.01)
        assert deadline.run(lambda: bool(rings) or time.sleep(0.2) or bool(rings), 0.01) is True
        assert deadline.run(lambda: True, 1.0) is None, "the time is over"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_search_that_has_ended_is_not_left_by_its_alarm():
    deadline = Deadline(3600.0)
    assert [deadline.run(lambda: 7, 0.02), time.sleep(0.1), deadline.run(lambda: 8, 0.02)] == [7, None, 8]


def test_a_search_without_a_plan_that_the_clock_ended_is_not_said_to_fit_nothing(monkeypatch):
    def late(settings, traced):
        settings.budget.stop()
        raise OutOfMemoryError("none was found")

    with pytest.raises(OutOfMemoryError) as caught:
        plan(memory_limit_bytes=20_000)
    monkeypatch.setattr("autopar.why.question.decide", late)
    assert solve(caught.value.asked[0], None) == OUT_OF_TIME


def test_a_search_for_the_plan_that_is_left_is_a_conflict_that_claims_less():
    deadline = Deadline(60.0)

    def left():
        step = autopar.parallelize(train_step, **SETTINGS, memory_limit_bytes=80_000)
        with listening(lambda progress: progress.phase == "planning on one mesh" and deadline.stop()):
            return step.plan(*shapes())

    assert deadline.run(left, 60.0) is None
    error = nothing_found(deadline)
    answer = str(error.conflict(budget_s=1e-9))
    assert answer.startswith("No plan was found in the time there was that fits 78.1 KiB per device. There may be one.")
    assert answer.endswith("More planning seconds may find a plan, and would try the rest.")
    assert "largest tensors" not in answer, "the error knows none"
    with pytest.raises(ArgumentError, match="before the search for a plan began"):
        nothing_found(Deadline(60.0))


def granted(words: str, given: dict[str, object]):
    """The plan where what the words say is given up, or asked for."""
    if words.startswith("without "):
        fields = {
            "zero3()": "constraints", "mesh_shape=[(2, 2)]": "mesh_shape", "num_microbatches=1": "num_microbatches",
            "recompute='none'": "recompute",
        }  # fmt: skip
        lost = [fields[one] for one in words.removeprefix("without ").split(" and ")]
        return plan(**{name: value for name, value in given.items() if name not in lost})
    name, _, value = words.partition(" ")[0].partition("=")
    return plan(**given | {name: int(value.replace("_", ""))})


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.35, 0.6])
def test_each_relaxation_that_has_a_price_gives_a_plan_of_that_price_when_it_is_granted(part):
    free = {"mesh_shape": (2, 2), "num_microbatches": 1, "recompute": "none", "constraints": autopar.zero3()}
    given = free | {"memory_limit_bytes": int(part * plan(**free).peak_bytes)}
    priced = [one for one in conflict_of(**given).answer.relaxations if one.step_s is not None]
    assert priced
    for one in priced:
        found = granted(one.words, given)
        assert found.step_s == pytest.approx(one.step_s, rel=1e-9), one.words
        assert found.peak_bytes == one.peak_bytes, one.words


def test_an_error_of_nobodys_step_has_no_conflict():
    with pytest.raises(PlanError, match="has to come from parallelize"):
        OutOfMemoryError("no").conflict()


@pytest.mark.sweep
def test_the_command_line_prints_the_conflict_where_it_is_asked_for(capsys):
    model = ["mlp", "--layers", "1", "--hidden", "32", "--devices", "2", "--no-plan-cache", "--memory-limit", "4KB"]
    assert main(["plan", *model, "--conflict"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("No plan fits 3.9 KiB per device, whatever is given up.")
    assert "What would do, tried" in out
    assert main(["plan", *model]) == 2
    assert jax.device_count() == 8
    assert main(["plan", *model[:-2], "--conflict"]) == 0
    assert "--conflict: nothing conflicts, the plan takes " in capsys.readouterr().out
