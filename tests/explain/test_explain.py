"""What a plan's report says, and that it says nothing the plan does not show."""

import dataclasses
import io
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from autopar.cost_model.hardware import PRESETS
from autopar.explain import TEXT_WIDTH, bytes_text, explain, seconds_text, show, standard_output
from autopar.explain.paths import layout_text, path_patterns, source_text
from autopar.explain.units import percent_text
from autopar.plan import Candidate
from autopar.simulate.plan_overlap import overlap_of, overlap_table
from autopar.simulate.reprice import reprice
from tests.plan_examples import (
    BATCH,
    collective,
    layer_stack,
    leaf,
    plan_of,
    rows_of,
)

# --- numbers, layouts, paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (16e9, "14.9 GiB"),
        (3 * 1024**5, "3.0 PiB"),
        (5000 * 1024**5, "5,000.0 PiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_keeps_them_below_1024(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-9, "2.00 ns"),
        (1.234e-6, "1.23 us"),
        (99.96e-6, "100 us"),
        (999.6e-6, "1.00 ms"),
        (0.01234, "12.3 ms"),
        (0.9996, "1.00 s"),
        (78.94, "78.9 s"),
        (123456.0, "123,456 s"),
        (math.inf, "inf s"),
    ],
)
def test_seconds_are_written_with_three_digits(seconds, text):
    assert seconds_text(seconds) == text


@given(st.floats(1e-9, 1e9))
def test_a_written_time_reads_back_within_half_a_percent(seconds):
    number, unit = seconds_text(seconds).split()
    read = float(number.replace(",", "")) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}[unit]
    assert read == pytest.approx(seconds, rel=5.1e-3)


@given(st.integers(1, 2**60))
def test_a_written_size_reads_back_within_five_percent(size):
    number, unit = bytes_text(size).split()
    power = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert float(number.replace(",", "")) * 1024**power == pytest.approx(size, rel=5e-2)


def test_a_layout_names_the_axes_of_each_dimension():
    assert layout_text((("x",), ())) == "[x, -]"
    assert layout_text((("x", "y"), (), ())) == "[(x,y), -, -]"
    assert layout_text(((), ())) == "replicated"
    assert layout_text(()) == "replicated"


def expanded(pattern: str) -> set[str]:
    """Oracle: the paths that a pattern with braces stands for, by reading its text."""
    choices = []
    for component in pattern.split("/"):
        match = re.fullmatch(r"(.*)\{(.*)\}", component)
        if not match:
            choices.append([component])
            continue
        names = []
        for item in match[2].split(","):
            low, _, high = item.partition("..")
            names += [str(n) for n in range(int(low), int(high) + 1)] if high else [item]
        choices.append([match[1] + name for name in names])
    return {"/".join(names) for names in itertools.product(*choices)}


NAMES = st.sampled_from(["a", "b", "w_0", "w_1", "w_2", "7"])


@given(st.sets(st.lists(NAMES, min_size=1, max_size=3).map(tuple), max_size=30))
def test_patterns_stand_for_exactly_the_paths_they_are_made_from(names):
    paths = {"/".join(parts) for parts in names}
    patterns = path_patterns(sorted(paths))
    stood_for = [path for pattern in patterns for path in expanded(str(pattern))]
    assert sorted(stood_for) == sorted(paths)
    assert sum(pattern.count for pattern in patterns) == len(paths)


def test_equal_layers_share_a_pattern_and_differing_ones_do_not():
    layers = [f"p/block_{n}/{name}" for n in range(48) for name in ("up", "down")]
    assert [str(pattern) for pattern in path_patterns(layers)] == ["p/block_{0..47}/{up,down}"]
    assert [str(p) for p in path_patterns(["b_0", "b_1", "b_3", "b_4", "b_5"])] == ["b_{0,1,3..5}"]
    assert [str(p) for p in path_patterns(["a/x", "a/y", "b/x"])] == ["{a,b}/x", "a/y"]
    many = [f"p/{letter}" for letter in "abcdefgh"]
    assert [str(p) for p in path_patterns(many)] == ["p/{a,b,c,d,e,f, and 2 more}"]


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_header_states_mesh_times_memory_and_proof():
    text = explain(plan_of(BATCH))
    assert text.startswith("mesh x=2, y=4 (8 devices) on cluster cpu\n")
    again = explain(plan_of(BATCH, num_microbatches=2, recompute=True))
    assert "on cluster cpu, in 2 microbatches, backward repeats layers' forward work\n" in again
    assert "predicted step 150 ms = 100 ms compute + 50.0 ms communication" in text
    assert "peak memory 3.0 GiB per device of 12.0 GiB (25%)" in text
    assert "planned in 1.50 s, proven optimal under the cost model" in text


def test_the_header_says_when_there_is_no_limit_and_no_proof():
    assert "3.0 GiB per device, no limit" in explain(plan_of(BATCH, memory_limit_bytes=None))
    stopped = explain(plan_of(BATCH, lower_bound_s=0.12))
    assert "not proven optimal: another plan could save at most 20.0% of the step under the cost model" in stopped
    assert "no bound on the best plan is known" in explain(plan_of(BATCH, lower_bound_s=0.0))


def test_the_header_says_over_which_plans_the_bound_is():
    near = explain(plan_of(BATCH, lower_bound_s=0.1, one_mesh_bound_s=0.12))
    on_one = "not proven optimal: another plan on one mesh could save at most 20.0% of the step"
    assert f"{on_one}, one in stages at most 33.3%, under the cost model" in near
    assert f"{on_one} under the cost model" in explain(plan_of(BATCH, lower_bound_s=0.01, one_mesh_bound_s=0.12))
    best = explain(plan_of(BATCH, lower_bound_s=0.1, one_mesh_bound_s=0.15))
    assert "proven optimal on one mesh; a plan in stages could save at most 33.3% of the step under the cost" in best
    assert "proven optimal under the cost model" in explain(plan_of(BATCH, lower_bound_s=0.15, one_mesh_bound_s=0.15))


def test_equal_leaves_share_a_row_whose_bytes_are_their_sum():
    rows = rows_of(explain(plan_of(*layer_stack(48), BATCH)), "Parameters and state")
    assert rows == [
        ["state/params/block_{0..47}/up", "48", "(32, 32)", "float32", "[-, y]", "48.0 KiB"],
        ["state/params/block_{0..47}/down", "48", "(32, 32)", "float32", "[y, -]", "48.0 KiB"],
        ["all", "96", "96.0 KiB"],
    ]


def test_full_gives_each_leaf_and_each_collective_its_row():
    twice = (collective("all-reduce", "x"), collective("all-reduce", "x"))
    plan = plan_of(*layer_stack(48), BATCH, collectives=twice)
    text = explain(plan, full=True)
    assert len(rows_of(text, "Parameters and state")) == 96 + 1
    assert len(rows_of(text, "Collectives per step")) == 2 + 1
    assert len(rows_of(explain(plan), "Collectives per step")) == 1 + 1


def test_a_report_does_not_grow_with_the_depth_of_the_model():
    few, many = (explain(plan_of(*layer_stack(layers), BATCH)).count("\n") for layers in (4, 400))
    assert few == many


def test_the_boundary_table_holds_batch_and_outputs():
    rows = rows_of(explain(plan_of(*layer_stack(1), BATCH)), "Batch and outputs")
    assert rows == [
        ["batch/tokens", "1", "(16, 64)", "float32", "[x, -]", "2.0 KiB"],
        ["-> 1/loss", "1", "()", "float32", "replicated", "4 B"],
    ]


def test_a_returned_state_is_one_row_only_if_its_layouts_are_those_it_came_in_with():
    state = [leaf("state/step", ()), *layer_stack(2)]
    loss = leaf("output/1/loss", (), role="output")
    places = [f"output/0/{value.path.removeprefix('state/')}" for value in state]
    kept = [dataclasses.replace(v, path=path, role="output") for v, path in zip(state, places, strict=True)]
    same = plan_of(*state, BATCH, outputs=(*kept, loss))
    assert rows_of(explain(same), "Batch and outputs")[1:] == [
        ["-> state", "5", "as it came in", "4.0 KiB"],
        ["-> output/1/loss", "1", "()", "float32", "replicated", "4 B"],
    ]
    assert "as it came in" not in explain(same, full=True)
    moved = dataclasses.replace(same, outputs=(kept[0], *(leaf(v.path, v.shape) for v in kept[1:]), loss))
    rows = [row[0] for row in rows_of(explain(moved), "Batch and outputs")]
    assert rows[1:] == ["-> output/0/step", "-> output/0/params/block_{0,1}/{up,down}", "-> output/1/loss"]


def test_equal_collectives_of_one_line_share_a_row_and_all_are_summed():
    items = [collective("all-reduce", "x", count=2) for n in range(3)]
    items.append(collective("all-gather", "y", operand="float32[9]", source="m.py:99"))
    rows = rows_of(explain(plan_of(BATCH, collectives=tuple(items))), "Collectives per step")
    assert rows == [
        ["all-reduce", "x", "6", "1.0 KiB", "6.0 KiB", "6.00 ms", "-", "float32[7]", "m.py:7"],
        ["all-gather", "y", "1", "1.0 KiB", "1.0 KiB", "1.00 ms", "-", "float32[9]", "m.py:99"],
        ["all", "7", "7.0 KiB", "7.00 ms", "-"],
    ]


def test_source_lines_are_written_without_the_folders_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert source_text(f"{tmp_path}/model.py:3:4 (loss)") == "model.py:3:4 (loss)"
    assert source_text("/env/lib/python3.11/site-packages/flax/linen/linear.py:9") == "flax/linen/linear.py:9"
    assert source_text("/elsewhere/model.py:3") == "/elsewhere/model.py:3"


def test_operands_beyond_two_are_counted():
    items = tuple(collective("all-reduce", "x", operand=name) for name in ("a", "b/c", "d/e/f", "g/h/i/j"))
    assert "a, b/c, and 2 more" in explain(plan_of(BATCH, collectives=items))


def test_the_largest_tensors_at_the_peak_come_first():
    rows = rows_of(explain(plan_of(BATCH)), "The 3 largest tensors at the memory peak")
    assert rows == [["logits", "2", "(16, 256)", "float32", "16.0 KiB"], ["small", "1", "(2,)", "int8", "2 B"]]


def test_compared_meshes_tell_the_chosen_one_and_those_that_do_not_fit():
    meshes = (Candidate((8,), None), Candidate((2, 4), 0.15), Candidate((4, 2), 0.3), Candidate((2, 2, 2), None, 0.2))
    rows = rows_of(explain(plan_of(BATCH, candidates=meshes)), "Meshes compared")
    assert rows[:2] == [["x=8", "does not fit the memory"], ["x=2, y=4", "150 ms", "chosen"]]
    assert rows[2:] == [
        ["x=4, y=2", "300 ms", "100.0% slower"],
        ["x=2, y=2, z=2", "at least 200 ms", "at least 33.3% slower"],
    ]
    left = explain(plan_of(BATCH, lower_bound_s=0.1, candidates=(*meshes[:2], Candidate((2, 2, 2), None, 0.12))))
    assert "could save at most 20.0%: left, as its search would take longer than that is worth" in " ".join(
        left.split()
    )
    named = plan_of(BATCH, candidates=meshes[-1:], axis_names=("data", "model"))
    assert rows_of(explain(named), "Meshes compared") == [["(2, 2, 2)", "at least 200 ms", "at least 33.3% slower"]], (
        "no name of the third is known"
    )


def test_collectives_come_by_their_seconds_and_in_full_with_algorithm_and_link():
    some = [
        dataclasses.replace(
            collective("all-reduce", "x", source=f"m.py:{n}"), predicted_s=seconds, algorithm="ring", link="NVLink"
        )
        for n, seconds in enumerate((1e-3, 4e-3, 2e-3))
    ]
    plan = plan_of(BATCH, collectives=tuple(some))
    for full in (False, True):
        rows = rows_of(explain(plan, full=full), "Collectives per step")
        assert [row[-1] for row in rows[:-1]] == ["m.py:1", "m.py:2", "m.py:0"]
        assert (rows[0][7:9] == ["ring", "NVLink"]) == full


def test_tables_without_rows_are_left_out():
    text = explain(plan_of(BATCH, peak_tensors=()))
    assert "Meshes compared" not in text
    assert "Collectives" not in text
    assert "Largest" not in text


def test_names_with_brackets_are_not_taken_for_markup():
    assert "state/[bold]w[/bold]" in explain(plan_of(leaf("state/[bold]w[/bold]", (2,))))


def test_show_prints_to_the_console_it_is_given(capsys):
    stream = io.StringIO()
    show(plan_of(BATCH), Console(file=stream, width=100))
    assert "Batch and outputs" in stream.getvalue()
    assert capsys.readouterr().out == ""
    show(plan_of(BATCH))
    assert "Batch and outputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (1, 8, "12%"),
        (0, 8, "0%"),
        (8, 8, "100%"),
        (999, 1000, ">99%"),
        (1, 1000, "<1%"),
        (1001, 1000, ">100%"),
        (0, 0, "0%"),
    ],
)
def test_a_share_is_only_called_none_or_all_if_it_is(part, whole, text):
    assert percent_text(part, whole) == text


@pytest.mark.parametrize(("columns", "width"), [("0", TEXT_WIDTH), ("77", 77), (None, TEXT_WIDTH)])
def test_a_report_outside_of_a_terminal_is_as_wide_as_asked_for_and_never_of_no_width(columns, width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert standard_output().width == width


def test_the_parts_of_a_step_are_the_same_in_header_tables_and_simulation():
    items = collective("all-reduce", "x", count=3), collective("all-gather", "y", count=2)
    plan = plan_of(BATCH, collectives=items, comm_s=sum(one.count * one.predicted_s for one in items))
    priced = reprice(plan, PRESETS[plan.cluster])
    assert priced.planned_step_s == plan.step_s == pytest.approx(plan.compute_s + plan.comm_s - plan.hidden_s)
    assert priced.planned_compute_s == pytest.approx(plan.compute_s)
    assert sum(kind.planned_s for kind in priced.communication) == pytest.approx(plan.comm_s)
    header = explain(plan).splitlines()[1]
    assert f"{seconds_text(plan.compute_s)} compute + {seconds_text(plan.comm_s)} communication" in header


def test_a_mask_that_depends_on_no_example_is_no_weight():
    mask = dataclasses.replace(collective("all-gather", "x", operand="bool[16,64]"), overlap="zero3")
    weight = dataclasses.replace(mask, operand="float32[16,64]")
    for some, said in (((mask,), "random bits"), ((weight,), "weights"), ((weight, mask), "weights, random bits")):
        hidden = plan_of(BATCH, collectives=some, hidden_s=0.0)
        rows = rows_of(explain(hidden), "Time of the step")
        assert [row[0] for row in rows if row[0].startswith("communication")] == [f"communication: {said}"]


def test_simulate_names_a_mask_that_is_gathered_random_bits_and_gives_an_all_to_all_its_row():
    mask = dataclasses.replace(collective("all-gather", "x", operand="bool[16,64]"), overlap="zero3")
    weight = dataclasses.replace(mask, operand="float32[16,64]")
    exchange = dataclasses.replace(collective("all-to-all", "x"), overlap="expert")
    usual = ["data parallel", "ZeRO-3", "tensor parallel", "pipeline"]
    for some, rows in (
        ((), usual),
        ((mask,), ["data parallel", "random bits", *usual[2:]]),
        ((weight,), usual),
        ((weight, mask), ["data parallel", "ZeRO-3, random bits", *usual[2:]]),
        ((exchange,), [*usual, "all-to-all"]),
    ):
        plan = plan_of(BATCH, collectives=some)
        table = overlap_table(overlap_of(plan, PRESETS[plan.cluster]), plan)
        assert list(table.columns[0].cells) == rows
