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

from autopar.explain import bytes_text, explain, findings, seconds_text, show
from autopar.explain.paths import layout_text, path_patterns
from autopar.plan import Candidate, CollectivePlan, LiveTensor, Plan, Spec, ValuePlan

MESH = {"x": 2, "y": 4}


def leaf(path: str, shape: tuple[int, ...], spec: Spec | None = None, *, role: str = "state") -> ValuePlan:
    spec = spec or ((),) * len(shape)
    ways = math.prod(MESH[axis] for axes in spec for axis in axes)
    return ValuePlan(path, role, shape, "float32", spec, 4 * math.prod(shape) // ways)


def collective(kind: str, axis: str, *, operand: str = "gradient", count: float = 1, source: str = "m.py:7"):
    return CollectivePlan(kind, (axis,), 1024, count, operand, source, 1e-3)


def plan_of(*inputs: ValuePlan, collectives: tuple[CollectivePlan, ...] = (), **changes) -> Plan:
    base = Plan(
        fingerprint="f",
        cluster="cpu",
        mesh_shape=tuple(MESH.values()),
        axis_names=tuple(MESH),
        inputs=inputs,
        outputs=(leaf("1/loss", (), role="other"),),
        choices=(),
        collectives=collectives,
        compute_s=0.1,
        comm_s=0.05,
        peak_bytes=3 * 2**30,
        memory_limit_bytes=12 * 2**30,
        peak_tensors=(LiveTensor("small", (2,), "int8", 2), LiveTensor("logits", (16, 256), "float32", 16384)),
        planning_s=1.5,
        lower_bound_s=0.15,
        allow_redundant_compute=False,
    )
    return dataclasses.replace(base, **changes)


BATCH = leaf("batch/tokens", (16, 64), (("x",), ()), role="batch")
WHOLE_BATCH = leaf("batch/tokens", (16, 64), role="batch")
UP, DOWN = "state/params/up/kernel", "state/params/down/kernel"


def layer_stack(layers: int) -> list[ValuePlan]:
    specs = {"up": ((), ("y",)), "down": (("y",), ())}
    return [
        leaf(f"state/params/block_{n}/{name}", (32, 32), spec) for n in range(layers) for name, spec in specs.items()
    ]


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


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of the rows below a table's title."""
    lines = text.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()
    return [re.split(r"  +", line.strip()) for line in lines[1:]]


def test_the_header_states_mesh_times_memory_and_proof():
    text = explain(plan_of(BATCH))
    assert "mesh x=2, y=4 (8 devices) on cluster cpu" in text
    assert "predicted step 150 ms = 100 ms compute + 50.0 ms communication" in text
    assert "peak memory 3.0 GiB per device of 12.0 GiB (25%)" in text
    assert "planned in 1.50 s, proven optimal under the cost model" in text


def test_the_header_says_when_there_is_no_limit_and_no_proof():
    assert "3.0 GiB per device, no limit" in explain(plan_of(BATCH, memory_limit_bytes=None))
    stopped = explain(plan_of(BATCH, lower_bound_s=0.12))
    assert "not proven optimal: at most 25.0% slower than the best plan" in stopped
    assert "no bound on the best plan is known" in explain(plan_of(BATCH, lower_bound_s=0.0))


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
    state = layer_stack(2)
    same = plan_of(*state, BATCH, outputs=tuple(dataclasses.replace(v, path=f"0/{v.path}") for v in state))
    assert rows_of(explain(same), "Batch and outputs")[1:] == [["returned state", "4", "as it came in", "4.0 KiB"]]
    moved = dataclasses.replace(same, outputs=tuple(leaf(f"0/{v.path}", v.shape) for v in state))
    assert "as it came in" not in explain(moved)
    rows = rows_of(explain(moved), "Batch and outputs")
    assert rows[1][0] == "-> 0/state/params/block_{0,1}/{up,down}"


def test_equal_collectives_of_one_line_share_a_row_and_all_are_summed():
    items = [collective("all-reduce", "x", operand=f"block_{n}/out", count=2) for n in range(3)]
    items.append(collective("all-gather", "y", operand="embedding", source="m.py:99"))
    rows = rows_of(explain(plan_of(BATCH, collectives=tuple(items))), "Collectives per step")
    assert rows == [
        ["all-reduce", "x", "6", "1.0 KiB", "6.0 KiB", "3.00 ms", "block_{0..2}/out", "m.py:7"],
        ["all-gather", "y", "1", "1.0 KiB", "1.0 KiB", "1.00 ms", "embedding", "m.py:99"],
        ["all", "7", "7.0 KiB", "4.00 ms"],
    ]


def test_operands_beyond_two_are_counted():
    items = tuple(collective("all-reduce", "x", operand=name) for name in ("a", "b/c", "d/e/f", "g/h/i/j"))
    assert "a, b/c, and 2 more" in explain(plan_of(BATCH, collectives=items))


def test_the_largest_tensors_at_the_peak_come_first():
    rows = rows_of(explain(plan_of(BATCH)), "Largest at the memory peak")
    assert rows == [["logits", "(16, 256)", "float32", "16.0 KiB"], ["small", "(2,)", "int8", "2 B"]]


def test_compared_meshes_tell_the_chosen_one_and_those_that_do_not_fit():
    meshes = (Candidate((8,), None), Candidate((2, 4), 0.15), Candidate((4, 2), 0.3))
    rows = rows_of(explain(plan_of(BATCH, candidates=meshes)), "Meshes compared")
    assert rows == [["(8,)", "does not fit the memory"], ["(2, 4)", "150 ms", "chosen"], ["(4, 2)", "300 ms"]]


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


# --- strategies -------------------------------------------------------------------------------------------------------


def test_a_split_batch_and_whole_parameters_are_data_parallel():
    plan = plan_of(leaf(UP, (32, 32)), BATCH, collectives=(collective("all-reduce", "x", count=3),))
    assert findings(plan) == (
        "data parallel over x, 2 ways: the batch split by example, parameters replicated (3 all-reduce, 3.0 KiB)",
        "nothing is split over y and no collective runs over it: its devices repeat the same work",
    )


def test_axes_that_split_the_batch_together_are_one_finding():
    batch = leaf("batch/tokens", (16, 64), (("x", "y"), ()), role="batch")
    both = CollectivePlan("all-reduce", ("x", "y"), 1024, 1, "gradient", "m.py:7", 1e-3)
    (only,) = findings(plan_of(leaf(UP, (32, 32)), batch, collectives=(both,)))
    assert only == (
        "data parallel over x and y, 8 ways: the batch split by example, parameters replicated (1 all-reduce, 1.0 KiB)"
    )


def test_a_batch_of_which_only_some_inputs_are_split_says_so():
    plan = plan_of(leaf(UP, (32, 32)), BATCH, leaf("batch/mask", (16,), role="batch"))
    assert "1 of 2 batch inputs split by example" in findings(plan)[0]


def test_split_parameters_beside_a_whole_batch_are_tensor_parallel():
    parameters = (
        leaf(UP, (32, 32), ((), ("y",))),
        leaf(DOWN, (32, 32), (("y",), ())),
        leaf("state/params/up/bias", (32,), (("y",),)),
        leaf("state/params/norm/scale", (32,)),
    )
    found = findings(plan_of(*parameters, BATCH, collectives=(collective("all-reduce", "y", count=2),)))
    assert found[0].startswith("data parallel over x, 2 ways: the batch split by example, parameters replicated")
    assert found[1] == (
        "tensor parallel over y, 4 ways: 3 of 4 parameters (98% of their bytes) are split, "
        "of them 1 by column, 1 by row, 1 of other rank; the batch is not (2 all-reduce, 2.0 KiB)"
    )


SHARDED = ((("x",), ()), (("x",), ()))


def test_parameters_split_as_the_batch_and_gathered_are_fully_sharded():
    parameters = [leaf(path, (32, 32), spec) for path, spec in zip((UP, DOWN), SHARDED, strict=True)]
    moved = (collective("all-gather", "x", count=2), collective("reduce-scatter", "x"))
    found = findings(plan_of(*parameters, BATCH, collectives=moved))
    assert found[0] == (
        "fully sharded (FSDP, ZeRO-3) over x, 2 ways: the batch and 2 of 2 parameters (100% of their bytes) are split "
        "(2 all-gather, 2.0 KiB; 1 reduce-scatter, 1.0 KiB)"
    )


def test_parameters_split_as_the_batch_are_not_called_fully_sharded_without_an_all_gather():
    parameters = [leaf(path, (32, 32), spec) for path, spec in zip((UP, DOWN), SHARDED, strict=True)]
    found = findings(plan_of(*parameters, BATCH, collectives=(collective("all-reduce", "x"),)))
    assert not any("FSDP" in sentence for sentence in found)
    assert "parameters replicated but for state/params/{up,down}/kernel (100% of their bytes)" in found[0]


def test_one_small_split_parameter_does_not_make_a_plan_fully_sharded():
    parameters = (leaf(UP, (128, 128)), leaf("state/params/embedding", (16, 128), (("x",), ())))
    found = findings(plan_of(*parameters, BATCH, collectives=(collective("all-gather", "x"),)))
    assert found[0].startswith(
        "data parallel over x, 2 ways: the batch split by example, "
        "parameters replicated but for state/params/embedding (11% of their bytes)"
    )


def test_optimizer_leaves_split_alone_are_zero_1_or_2():
    inputs = (leaf(UP, (32, 32)), leaf("state/opt_state/0/mu/up/kernel", (32, 32), (("x",), ())), BATCH)
    moved = (collective("reduce-scatter", "x"), collective("all-gather", "x"))
    found = findings(plan_of(*inputs, collectives=moved))
    assert found[0] == "data parallel over x, 2 ways: the batch split by example, parameters replicated"
    assert found[1] == (
        "optimizer state sharded (ZeRO-1/2) over x, 2 ways: 1 of 1 optimizer leaves (100% of their bytes) are split, "
        "their parameters are not (1 reduce-scatter, 1.0 KiB; 1 all-gather, 1.0 KiB)"
    )


EXPERTS = ("state/params/moe/up", (8, 32, 64), (("x",), (), ()))


def test_experts_split_as_the_batch_with_all_to_all_are_expert_parallel():
    inputs = (
        leaf(*EXPERTS),
        leaf("state/opt_state/0/mu/moe/up", *EXPERTS[1:]),
        leaf("state/params/gate/kernel", (32, 8)),
        BATCH,
    )
    moved = (collective("all-to-all", "x", count=4), collective("all-reduce", "x"))
    found = findings(plan_of(*inputs, collectives=moved))
    assert found[:2] == (
        "expert parallel over x, 2 ways: state/params/moe/up split along the first dimension, and values exchanged "
        "(4 all-to-all, 4.0 KiB)",
        "data parallel over x, 2 ways: the batch split by example, the other parameters replicated "
        "(1 all-reduce, 1.0 KiB)",
    )
    assert not any("ZeRO" in sentence for sentence in found)


def test_a_leading_dimension_split_without_all_to_all_is_not_called_expert_parallel():
    found = findings(plan_of(leaf(*EXPERTS), BATCH, collectives=(collective("all-reduce", "x"),)))
    assert not any("expert" in sentence for sentence in found)


def test_an_input_split_along_another_dimension_is_told_with_the_dimension():
    batch = leaf("batch/tokens", (16, 64), (("x",), ("y",)), role="batch")
    found = findings(plan_of(leaf(UP, (32, 32)), batch))
    assert found[1] == "inputs split over y, 4 ways, along dimension 1: batch/tokens"


def test_optimizer_state_split_over_an_axis_of_its_own_is_told():
    found = findings(plan_of(leaf(UP, (32, 32)), leaf("state/opt_state/mu/up/kernel", (32, 32), (("y",), ())), BATCH))
    assert found[1] == (
        "1 of 1 optimizer leaves (100% of their bytes) are split over y, 4 ways; batch and parameters are not"
    )


def test_an_axis_of_one_device_is_not_spoken_of():
    assert len(findings(plan_of(BATCH, mesh_shape=(2, 1)))) == 1


def test_a_layer_that_is_named_like_an_optimizer_leaf_stays_a_parameter():
    found = findings(plan_of(leaf("state/params/mu/kernel", (32, 32), ((), ("y",))), WHOLE_BATCH))
    assert any(sentence.startswith("tensor parallel over y, 4 ways: 1 of 1 parameters") for sentence in found)


def test_state_without_params_counts_as_parameters():
    found = findings(plan_of(leaf("state/w", (32, 32), ((), ("y",))), WHOLE_BATCH))
    assert any(sentence.startswith("tensor parallel over y, 4 ways: 1 of 1 parameters") for sentence in found)
