"""What was recorded stands beside the plan, in the terminal and on the page."""

import dataclasses
import re

import pytest

from autopar import RecordedRun
from autopar.errors import ArgumentError
from autopar.plan import Plan
from autopar.reports.measured import draw_row
from tests.recording.recordings import PLAN, PRODUCT, STAGES, in_stages, on_one_mesh, ran, span


def test_the_report_draws_the_predicted_pipeline_above_the_measured_one_to_one_scale(capsys):
    STAGES.show(recorded=RecordedRun(in_stages()))
    text = capsys.readouterr().out
    rows = re.findall(r"^(predicted|measured) +mesh (\d) +\| (.*)$", text, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [(name, mesh) for name in ("predicted", "measured") for mesh in "01"]
    drawn = {row[:2]: row[2] for row in rows}
    assert drawn["measured", "0"].count("B") == pytest.approx(2 * drawn["measured", "0"].count("F"), abs=2)
    assert drawn["measured", "1"].startswith(".")
    assert drawn["measured", "0"].endswith("U")
    assert len(drawn["predicted", "0"]) < len(drawn["measured", "0"])
    assert "Measured beside predicted" in text


def test_a_row_has_a_letter_for_what_runs_and_a_dot_for_waiting():
    spans = [span(0, "forward", 0, 2, 0), span(0, "input_gradient", 4, 5, 0), span(0, "weight_gradient", 5, 6, 0)]
    assert draw_row(spans, 8e-3, 8) == "FF..BW"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plan", "recorded"), [(PLAN, on_one_mesh()), (STAGES, in_stages())], ids=["one mesh", "stages"]
)
def test_the_page_shows_what_was_recorded_first(plan, recorded):
    text = plan.html(recorded=RecordedRun(recorded))
    assert text.index("Measured beside predicted") < text.index("The time of a step")
    charts = re.findall(r'aria-label="(measured-[a-z]+)', text)
    assert charts == ["measured-parts"] * 2 + ["measured-devices" if isinstance(plan, Plan) else "measured-pipeline"]
    assert "which was looked into and took 7.00 ms; the 3 others, at the median, took 5.00 ms." in text
    assert ("mesh 1 measured" in text) == (plan is STAGES)
    assert plan.html() == plan.html(recorded=None)


@pytest.mark.parametrize(
    ("calls", "said"), [(2, "; no other call was timed."), (3, "; the one other took 4.00 ms.")], ids=["none", "one"]
)
def test_the_picture_of_a_call_says_which_and_how_many_others_there_are(calls, said):
    run = on_one_mesh()
    text = PLAN.html(recorded=RecordedRun(dataclasses.replace(run, calls=run.calls[:calls])))
    assert f"<p>Measured is call 2, which was looked into and took 7.00 ms{said}</p>" in text


def test_a_recording_of_another_plan_is_refused():
    other = dataclasses.replace(PLAN, mesh_shape=(4,))
    with pytest.raises(ArgumentError, match="the recording is of another plan of train: "):
        other.html(recorded=RecordedRun(on_one_mesh()))
    with pytest.raises(ArgumentError, match="Show it with that one, or record this one"):
        STAGES.show(recorded=RecordedRun(on_one_mesh()))


def of_many_operations(times: int):
    """A recording in which compute and an all-reduce take turns, with a long operation in the middle of them."""
    names = ["dot.1" if n % 2 else "psum.2" for n in range(times)]
    short = [ran(name, 0, n * 6 / times, (n + 0.5) * 6 / times) for n, name in enumerate(names)]
    return on_one_mesh(operations=(*short, ran("dot.1", 1, 2.0, 3.0)))


def test_the_picture_of_devices_has_a_block_for_each_moment_at_the_most():
    page = PLAN.html(recorded=RecordedRun(of_many_operations(40_000)))
    picture = re.search(r'aria-label="measured-devices".*?</svg>', page, re.DOTALL)[0]
    assert 10 < picture.count("<path") < 1_100


def test_of_more_operations_than_a_table_has_rows_the_last_one_has_the_share_of_the_others():
    program = tuple(dataclasses.replace(PRODUCT, name=f"dot.{n}") for n in range(12))
    operations = tuple(ran(f"dot.{n}", 0, n, n + (3 if n < 8 else 1)) for n in range(12))
    text = str(RecordedRun(on_one_mesh(program=program, operations=operations)))
    (row,) = (line for line in text.splitlines() if line.startswith("... "))
    assert re.fullmatch(r"\.\.\. 4 more +4\.00 ms +14% of all operations' time", row)
    fewer = str(RecordedRun(on_one_mesh(program=program[:8], operations=operations[:8])))
    assert "more" not in fewer[fewer.index("The operations that took longest") :]
