"""Ctrl-C and SIGTERM while a plan is sought: when they end the command at once, and when with the best plan so far."""

import pkgutil
import re
import signal
import subprocess
import time

import pytest

import autopar
from autopar.commands.plans import plan
from autopar.errors import OutOfMemoryError
from autopar.plan import Plan
from autopar.progress import Progress, listening
from tests.commands.command_line import SMALL, run, start


@pytest.fixture(autouse=True)
def usual_handlers():
    """As at a terminal; shells start programs in the background with Ctrl-C ignored."""
    numbers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, usual) for number, usual in numbers.items()}
    yield
    assert {number: signal.getsignal(number) for number in numbers} == numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def sent(phase: str, *numbers: int):
    """A listener that sends this process signals when a phase begins, for the first time."""
    left = list(numbers)

    def hear(progress: Progress) -> None:
        if progress.phase is not None and progress.phase.startswith(phase):
            while left:
                signal.raise_signal(left.pop(0))

    return listening(hear)


@pytest.mark.parametrize("command", [("plan", "mlp"), ("train", "mlp", "--steps", "1")])
def test_ctrl_c_during_the_search_prints_the_plan_so_far_and_ends_with_130(command, capsys):
    with sent("planning on one mesh", signal.SIGINT):
        assert run(*command, *SMALL, "--devices", "2", "--mesh", "2") == 130
    printed = capsys.readouterr()
    assert printed.out.startswith("mesh x=2 (2 devices)")
    assert "loss" not in printed.out.split("Meshes compared")[1], "nothing is trained"
    assert printed.err == "autopar: stopped by Ctrl-C: the plan is the best that was found so far\n"


def test_the_plan_so_far_is_written_where_asked(tmp_path):
    file = tmp_path / "plan.json"
    with sent("planning on one mesh", signal.SIGINT):
        assert run("plan", "mlp", *SMALL, "--devices", "2", "-o", file) == 130
    assert Plan.from_json(file.read_text()).mesh_shape == (2,)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("late", ["autopar.api.find_unlisted", "autopar.commands.plans.plan.save"])
def test_a_signal_that_comes_when_the_search_has_just_ended_does_not_cost_its_plan(
    late, number, status, tmp_path, monkeypatch
):
    file, usual = tmp_path / "plan.json", pkgutil.resolve_name(late)

    def interrupted(*args, **kwargs):
        signal.raise_signal(number)
        return usual(*args, **kwargs)

    monkeypatch.setattr(late, interrupted)
    assert ended(lambda: run("plan", "mlp", *SMALL, "--devices", "2", "-o", file)) == status
    assert Plan.from_json(file.read_text()).num_devices == 2


def ended(command):
    """The exit status of a command."""
    try:
        return command()
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("phase", ["building", "tracing"])
def test_ctrl_c_before_the_search_ends_the_command_at_once(phase, capsys):
    with sent(phase, signal.SIGINT):
        assert run("plan", "mlp", *SMALL, "--devices", "2") == 130
    assert capsys.readouterr() == ("", "autopar: stopped by Ctrl-C\n")


def test_a_second_ctrl_c_ends_the_command_at_once(capsys):
    with sent("planning on one mesh", signal.SIGINT, signal.SIGINT):
        assert run("plan", "mlp", *SMALL, "--devices", "2") == 130
    assert capsys.readouterr() == ("", "autopar: stopped by Ctrl-C\n")


def test_sigterm_does_the_same_with_its_own_status(capsys):
    with sent("planning on one mesh", signal.SIGTERM), pytest.raises(SystemExit) as ended:
        run("plan", "mlp", *SMALL, "--devices", "2")
    printed = capsys.readouterr()
    assert ended.value.code == 143
    assert printed.out.startswith("mesh x=2 (2 devices)")
    assert printed.err == "autopar: stopped by SIGTERM: the plan is the best that was found so far\n"


def test_a_search_that_has_no_plan_when_it_is_stopped_says_so(capsys, monkeypatch):
    def search(*arguments, **wishes):
        signal.raise_signal(signal.SIGINT)
        raise OutOfMemoryError("nothing fits")

    monkeypatch.setattr("autopar.api.decide_together", search)
    assert run("plan", "mlp", *SMALL, "--devices", "2") == 130
    assert capsys.readouterr() == ("", "autopar: stopped by Ctrl-C: there was no plan yet: nothing fits\n")


def test_an_error_of_a_search_that_nobody_stopped_is_status_2(capsys):
    assert run("plan", "mlp", *SMALL, "--devices", "2", "--memory-limit", "1kB") == 2
    assert "no plan fits" in capsys.readouterr().err


def test_a_signal_that_is_ignored_stays_ignored(capsys):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with sent("planning on one mesh", signal.SIGINT):
        assert run("plan", "mlp", *SMALL, "--devices", "2") == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert capsys.readouterr().err == ""


CONFLICT = ("plan", "mlp", *SMALL, "--devices", "2", "--mesh", "2", "--memory-limit", "4KB", "--conflict")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("phase", ["planning on one mesh", "why nothing fits"])
@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_while_it_looks_for_what_conflicts_hands_over_the_answer_so_far(number, status, name, phase, capsys):
    with sent(phase, number):
        try:
            ended = run(*CONFLICT)
        except SystemExit as error:
            ended = error.code
    printed = capsys.readouterr()
    assert ended == status
    found = re.match(r"No plan (fits|was found in the time there was that fits) 3\.9 KiB per device", printed.out)
    assert found is not None, printed.out
    assert "no time to try" in printed.out
    assert printed.err == f"autopar: stopped by {name}: the answer is what was found so far\n"


def test_a_second_signal_ends_the_command_without_an_answer(capsys):
    with sent("why nothing fits", signal.SIGINT, signal.SIGINT):
        assert run(*CONFLICT) == 130
    assert capsys.readouterr() == ("", "autopar: stopped by Ctrl-C\n")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_process_that_gets_a_signal_hands_over_its_plan(number, status, tmp_path):
    file = tmp_path / "plan.json"
    command = ("plan", "mlp", *SMALL, "--devices", "8", "-v", "-o", str(file))
    process = start(*command, module="tests.commands.terminal.held", stdin=subprocess.PIPE)
    errors = "".join(iter(process.stderr.readline, "held\n"))
    assert "planning on one mesh" in errors
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    assert "plan is the best that was found so far" in errors
    assert output.startswith("mesh ")
    assert Plan.from_json(file.read_text()).fingerprint


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_plan_is_printed_leaves_it_whole(number, status, capsys, monkeypatch, tmp_path):
    printed = plan._print

    def interrupted(*args):
        signal.raise_signal(number)
        printed(*args)

    monkeypatch.setattr(plan, "_print", interrupted)
    try:
        code = run("plan", "mlp", *SMALL, "--devices", "2", "-o", tmp_path / "plan.json")
    except SystemExit as ending:
        code = ending.code
    assert code == status
    assert "predicted step" in capsys.readouterr().out
    assert autopar.plan_from_json((tmp_path / "plan.json").read_text()).num_devices == 2


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
@pytest.mark.parametrize("question", [("--classic", "--what-if"), ("--leaf", "state/params/Dense_0/kernel")])
def test_a_signal_while_the_plan_is_compared_with_others_leaves_its_report(
    number, status, name, question, capsys, tmp_path
):
    def hear(progress: Progress) -> None:
        if progress.search is not None and ", 2 of " in progress.search:
            signal.raise_signal(number)

    page = tmp_path / "page.html"
    with listening(hear):
        assert ended(lambda: run("plan", "mlp", *SMALL, "--devices", "2", *question, "--html", page)) == status
    printed = capsys.readouterr()
    assert "predicted step" in printed.out
    assert "The classic plans" not in printed.out
    assert "predicted step" in page.read_text()
    assert (
        printed.err
        == f"autopar: stopped by {name}: the plan was found already; what was not answered by then is left out\n"
    )


def test_a_search_that_was_stopped_is_not_followed_by_others(capsys):
    with sent("planning on one mesh", signal.SIGINT):
        assert run("plan", "mlp", *SMALL, "--devices", "2", "--mesh", "2", "--classic") == 130
    assert "The classic plans" not in capsys.readouterr().out


def test_a_signal_that_comes_in_a_finaliser_ends_the_comparison_too(capsys, monkeypatch):
    class Signalling:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def compare(*_):
        Signalling()
        time.sleep(30.0)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr("autopar.why.classic.classic", compare)
    assert run("plan", "mlp", *SMALL, "--devices", "2", "--classic") == 130
    assert "predicted step" in capsys.readouterr().out
