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
from autopar.explain.paths import layout_text, path_patterns, source_text
from autopar.explain.strategies import traffic
from autopar.explain.units import percent_text
from autopar.pipeline_plan import PipelinePlan, StagePlan, TransferPlan
from autopar.plan import Candidate, CollectivePlan, LiveTensor, Plan, Spec, ValuePlan

MESH = {"x": 2, "y": 4}


def leaf(path: str, shape: tuple[int, ...], spec: Spec | None = None, *, role: str = "state") -> ValuePlan:
    spec = spec or ((),) * len(shape)
    ways = math.prod(MESH[axis] for axes in spec for axis in axes)
    return ValuePlan(path, role, shape, "float32", spec, 4 * math.prod(shape) // ways)


def collective(kind: str, axis: str, *, operand: str = "float32[7]", count: float = 1, source: str = "m.py:7"):
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
        peak_tensors=(LiveTensor("small", (2,), "int8", 2), *(LiveTensor("logits", (16, 256), "float32", 16384),) * 2),
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
        ["all-reduce", "x", "6", "1.0 KiB", "6.0 KiB", "6.00 ms", "float32[7]", "m.py:7"],
        ["all-gather", "y", "1", "1.0 KiB", "1.0 KiB", "1.00 ms", "float32[9]", "m.py:99"],
        ["all", "7", "7.0 KiB", "7.00 ms"],
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
    rows = rows_of(explain(plan_of(BATCH)), "Largest at the memory peak")
    assert rows == [["logits", "2", "(16, 256)", "float32", "16.0 KiB"], ["small", "1", "(2,)", "int8", "2 B"]]


def test_compared_meshes_tell_the_chosen_one_and_those_that_do_not_fit():
    meshes = (Candidate((8,), None), Candidate((2, 4), 0.15), Candidate((4, 2), 0.3), Candidate((2, 2, 2), None, 0.2))
    rows = rows_of(explain(plan_of(BATCH, candidates=meshes)), "Meshes compared")
    assert rows[:2] == [["(8,)", "does not fit the memory"], ["(2, 4)", "150 ms", "chosen"]]
    assert rows[2:] == [["(4, 2)", "300 ms"], ["(2, 2, 2)", "at least 200 ms"]]


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


# --- strategies -------------------------------------------------------------------------------------------------------

IDLE_Y = "nothing is split over y and no collective runs over it: its devices repeat the same work"
ALL_WHOLE = "1 of 1 parameters (100% of their bytes) replicated"
SHARDED = [leaf(UP, (32, 64), (("x",), ())), leaf(DOWN, (64, 32), (("x",), ()))]
EXPERTS = (8, 32, 64), (("x",), (), ())
ROUTER = leaf("state/params/gate/kernel", (32, 8))


def test_a_split_batch_and_whole_parameters_are_data_parallel():
    plan = plan_of(leaf(UP, (32, 32)), BATCH, collectives=(collective("all-reduce", "x", count=3),))
    assert findings(plan) == (
        f"data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}",
        IDLE_Y,
    )


def test_collectives_are_summed_for_each_combination_of_axes():
    both = CollectivePlan("all-reduce", ("x", "y"), 1024, 3, "float32[7]", "m.py:7", 1e-3)
    items = (both, collective("all-gather", "y", count=2), collective("all-reduce", "y"), both)
    assert traffic(plan_of(BATCH, collectives=items)) == (
        "collectives over x and y: 6 all-reduce, 6.0 KiB",
        "collectives over y: 2 all-gather, 2.0 KiB; 1 all-reduce, 1.0 KiB",
    )
    assert "- collectives over y: 2 all-gather" in explain(plan_of(BATCH, collectives=items))


def test_a_step_without_parameters_can_be_data_parallel():
    assert findings(plan_of(BATCH))[0] == "data parallel over x, 2 ways: the batch split by example"


def test_axes_that_split_the_batch_together_are_one_finding():
    batch = leaf("batch/tokens", (16, 64), (("x", "y"), ()), role="batch")
    both = CollectivePlan("all-reduce", ("x", "y"), 1024, 1, "float32[32,32]", "m.py:7", 1e-3)
    assert findings(plan_of(leaf(UP, (32, 32)), batch, collectives=(both,))) == (
        f"data parallel over x and y, 8 ways: the batch split by example, {ALL_WHOLE}",
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
    assert found == (
        "data parallel over x, 2 ways: the batch split by example, 4 of 4 parameters (100% of their bytes) replicated",
        "tensor parallel over y, 4 ways: 3 of 4 parameters (98% of their bytes) split, "
        "of them 1 by column, 1 by row, 1 of other rank; the batch is not split by example",
    )


def test_parameters_split_as_the_batch_and_gathered_are_fully_sharded():
    moved = (
        collective("all-gather", "x", operand="float32[32,64]"),
        collective("all-gather", "x", operand="float32[32,64]"),
        collective("reduce-scatter", "x"),
    )
    assert findings(plan_of(*SHARDED, BATCH, collectives=moved)) == (
        "fully sharded (FSDP, ZeRO-3) over x, 2 ways: the batch and 2 of 2 parameters (100% of their bytes) split",
        IDLE_Y,
    )


def test_parameters_of_a_scan_may_be_gathered_one_layer_at_a_time():
    stacked = leaf("state/params/blocks/up", (12, 32, 64), ((), ("x",), ()))
    each = collective("all-gather", "x", operand="float32[32,64]", count=12)
    assert findings(plan_of(stacked, BATCH, collectives=(each,)))[0].startswith("fully sharded")
    once = dataclasses.replace(each, count=1)
    assert findings(plan_of(stacked, BATCH, collectives=(once,)))[0].startswith("tensor parallel")


def test_parameters_whose_activations_are_gathered_are_tensor_parallel_and_not_fully_sharded():
    gathered = collective("all-gather", "x", operand="float32[16,64,32]", count=4)
    found = findings(plan_of(*SHARDED, leaf("state/params/norm", (32,)), BATCH, collectives=(gathered,)))
    assert found[:2] == (
        "data parallel over x, 2 ways: the batch split by example, 1 of 3 parameters (1% of their bytes) replicated",
        "tensor parallel over x, 2 ways: 2 of 3 parameters (99% of their bytes) split, of them 2 by row",
    )


def test_one_small_gathered_parameter_does_not_make_a_plan_fully_sharded():
    parameters = (leaf(UP, (128, 128)), leaf("state/params/embedding", (16, 128), (("x",), ())))
    gathered = collective("all-gather", "x", operand="float32[16,128]")
    found = findings(plan_of(*parameters, BATCH, collectives=(gathered,)))
    assert not any("FSDP" in sentence for sentence in found)
    assert "1 of 2 parameters (89% of their bytes) replicated" in found[0]


def test_optimizer_leaves_split_alone_are_zero_1_or_2():
    inputs = (leaf(UP, (32, 32)), leaf("state/opt_state/0/mu/up/kernel", (32, 32), (("x",), ())), BATCH)
    moved = (collective("reduce-scatter", "x"), collective("all-gather", "x"))
    assert findings(plan_of(*inputs, collectives=moved)) == (
        f"data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}",
        "optimizer state sharded (ZeRO-1/2) over x, 2 ways: 1 of 1 optimizer leaves (100% of their bytes) split, "
        "their parameters are not",
        IDLE_Y,
    )


@pytest.mark.parametrize(("path", "router"), [("state/params/moe/up", ()), ("state/params/layer/wi", (ROUTER,))])
def test_experts_split_as_the_batch_with_all_to_all_are_expert_parallel(path, router):
    moments = leaf("state/opt_state/0/mu/" + path.removeprefix("state/params/"), *EXPERTS)
    rest = leaf("state/params/norm/scale", (32,))
    moved = (collective("all-to-all", "x", count=4, operand="float32[8,4,16,32]"), collective("all-reduce", "x"))
    found = findings(plan_of(leaf(path, *EXPERTS), moments, rest, *router, BATCH, collectives=moved))
    assert found[0].startswith("data parallel over x")
    assert found[1:] == (
        f"expert parallel over x, 2 ways: {path} split along the first dimension",
        IDLE_Y,
    )


@pytest.mark.parametrize(
    ("path", "kind"), [("state/params/moe/up", "all-reduce"), ("state/params/attention/out/kernel", "all-to-all")]
)
def test_without_all_to_all_or_any_sign_of_experts_a_split_first_dimension_is_not_expert_parallel(path, kind):
    found = findings(plan_of(leaf(path, *EXPERTS), BATCH, collectives=(collective(kind, "x"),)))
    assert not any("expert" in sentence for sentence in found)
    assert found[0].startswith("tensor parallel over x, 2 ways: 1 of 1 parameters")


def test_an_input_split_along_another_dimension_is_told_with_the_dimension():
    batch = leaf("batch/tokens", (16, 64), (("x",), ("y",)), role="batch")
    found = findings(plan_of(leaf(UP, (32, 32)), batch))
    assert found[1] == "inputs split over y, 4 ways, along dimension 1: batch/tokens"


def test_optimizer_state_split_over_an_axis_of_its_own_is_told():
    found = findings(plan_of(leaf(UP, (32, 32)), leaf("state/opt_state/mu/up/kernel", (32, 32), (("y",), ())), BATCH))
    assert found[1] == ("1 of 1 optimizer leaves (100% of their bytes) are split over y, 4 ways; parameters are not")


def test_an_axis_of_one_device_is_not_spoken_of():
    assert len(findings(plan_of(BATCH, mesh_shape=(2, 1)))) == 1


@pytest.mark.parametrize("path", ["state/params/mu/kernel", "state/w"])
def test_a_leaf_below_params_or_a_state_without_any_counts_as_parameters(path):
    found = findings(plan_of(leaf(path, (32, 32), ((), ("y",))), WHOLE_BATCH))
    assert any(sentence.startswith("tensor parallel over y, 4 ways: 1 of 1 parameters") for sentence in found)


# --- pipelines --------------------------------------------------------------------------------------------------------

LAYER, NORM, HEAD = "state/params/block_{}/up", "state/params/norm/scale", "state/params/head"
SENT = "received float32[16,64] of forward 0"


def stage_of(number: int, *inputs: ValuePlan, forward_s: float = 1e-3, mesh_shape=(2, 4), **changes) -> StagePlan:
    """A stage on a mesh of its own with axes x and y; the leaves of its state live there."""
    base = StagePlan(
        stage=number,
        mesh=number,
        first_device=number * math.prod(mesh_shape),
        leaves=tuple(value.path for value in inputs if value.role == "state"),
        forward_s=forward_s,
        backward_s=2 * forward_s,
        once_s=0.5e-3,
        microbatches_in_flight=2 - number % 2,
        peak_bytes=(3 - number) * 2**30,
        plan=plan_of(*inputs, mesh_shape=mesh_shape),
    )
    return dataclasses.replace(base, **changes)


def pipeline_of(*stages: StagePlan, transfers: tuple[TransferPlan, ...] = (), **changes) -> PipelinePlan:
    base = PipelinePlan(
        fingerprint="f",
        cluster="cpu",
        num_microbatches=4,
        schedule="1f1b",
        virtual_stages=1,
        cuts=(7,),
        stages=stages,
        transfers=transfers,
        step_s=0.02,
        bubble=0.25,
        memory_limit_bytes=12 * 2**30,
        planning_s=1.5,
    )
    return dataclasses.replace(base, **changes)


def two_stages(**second) -> tuple[StagePlan, StagePlan]:
    first = [leaf(LAYER.format(n), (32, 32)) for n in range(2)]
    then = [leaf(LAYER.format(n), (32, 32)) for n in range(2, 4)]
    return stage_of(0, *first, BATCH), stage_of(1, *then, leaf(NORM, (32,)), **second)


TRANSFERS = (
    TransferPlan(0, 1, "forward", 1024, 4, 1e-3),
    TransferPlan(1, 0, "backward", 2048, 4, 2e-3),
    TransferPlan(0, 1, "update", 4, 1, 1e-6),
)


def test_the_header_of_a_pipeline_states_stages_schedule_bubble_and_memory():
    text = explain(pipeline_of(*two_stages()))
    assert text.startswith(
        "2 stages x 8 devices (16 devices) on cluster cpu\n"
        "4 microbatches, schedule 1f1b\n"
        "predicted step 20.0 ms, bubble 25.0%; peak memory 3.0 GiB per device of 12.0 GiB (25%)\n"
        "planned in 1.50 s\n"
    )
    assert "3.0 GiB per device, no limit" in explain(pipeline_of(*two_stages(), memory_limit_bytes=None))


def test_one_microbatch_is_written_in_the_singular():
    text = explain(pipeline_of(*two_stages(), num_microbatches=1))
    assert "\n1 microbatch, schedule 1f1b\n" in text


def test_the_header_tells_meshes_of_different_sizes_and_stages_that_share_a_mesh():
    sizes = [stage_of(n, mesh_shape=shape) for n, shape in enumerate(((1, 1), (1, 2), (2, 2)))]
    assert explain(pipeline_of(*sizes)).startswith("3 stages on 1 + 2 + 4 devices (7 devices) on cluster cpu\n")
    shared = [stage_of(n, mesh=n % 2, mesh_shape=(1, 1)) for n in range(4)]
    text = explain(pipeline_of(*shared, virtual_stages=2, schedule="interleaved"))
    assert text.startswith("4 stages on 2 meshes (2 virtual stages each) x 1 device (2 devices) on cluster cpu\n")


def test_the_bubble_is_told_in_seconds_of_the_busiest_mesh():
    text = explain(pipeline_of(*two_stages(forward_s=2e-3)))
    assert (
        "- the bubble costs 6.00 ms per step: so long the busiest mesh waits for others, and 24.0 ms it works; " in text
    )
    assert "more microbatches make it smaller" in text
    none = explain(pipeline_of(*two_stages(forward_s=2e-3), bubble=0.0))
    assert "- no bubble: the busiest mesh works 24.0 ms per step without waiting" in none


def test_the_bottleneck_is_the_mesh_with_most_work_and_balance_is_said():
    text = explain(pipeline_of(*two_stages(forward_s=2e-3)))
    assert (
        "- stage 1 is the bottleneck: 6.00 ms of work per microbatch, 2.0 times as much as stage 0 with 3.00 ms" in text
    )
    balanced = explain(pipeline_of(*two_stages(forward_s=1.01e-3)))
    assert "- the stages are balanced: from 3.00 ms to 3.03 ms of work per microbatch" in balanced
    shared = [stage_of(n, mesh=n % 2, forward_s=1e-3 * (1 + n % 2)) for n in range(4)]
    assert (
        "- mesh 1 (stages 1 and 3) is the bottleneck: 12.0 ms of work per microbatch, 2.0 times as much as "
        "mesh 0 (stages 0 and 2) with 6.00 ms"
    ) in explain(pipeline_of(*shared, virtual_stages=2, schedule="interleaved"))


def test_the_fullest_mesh_and_the_longest_update_are_named():
    text = explain(pipeline_of(*two_stages(once_s=1e-3)))
    assert "- what happens once per step, such as the update, takes 1.00 ms on stage 1, where it takes longest" in text
    assert (
        "- stage 0 needs the most memory: 3.0 GiB per device, with the activations of 2 microbatches in flight" in text
    )


def test_what_crosses_is_summed_by_the_pass_that_reads_it():
    text = explain(pipeline_of(*two_stages(), transfers=TRANSFERS))
    assert (
        "- between meshes cross per step: 4.0 KiB for forward passes; 8.0 KiB for backward passes; 4 B once, for the update"
        in text
    )
    assert "- nothing crosses between meshes" in explain(pipeline_of(*two_stages()))


def test_the_table_of_stages_says_where_what_lives():
    rows = rows_of(explain(pipeline_of(*two_stages())), "Stages (forward and backward per microbatch)")
    assert rows == [
        ["0", "0", "0-7", "x=2, y=4", "2", "block_{0,1}", "1.00 ms", "2.00 ms", "500 us", "2", "3.0 GiB"],
        ["1", "1", "8-15", "x=2, y=4", "3", "block_{2,3}, norm", "1.00 ms", "2.00 ms", "500 us", "1", "2.0 GiB"],
    ]


def test_a_module_on_two_stages_lives_there_in_part_and_a_state_without_params_by_its_first_names():
    head = stage_of(0, leaf(f"{HEAD}/kernel", (32, 8)), leaf(LAYER.format(0), (32, 32)), mesh_shape=(1, 1))
    rest = stage_of(1, leaf(f"{HEAD}/bias", (8,)), mesh_shape=(1, 1))
    bare = stage_of(2, leaf("state/w", (2,)), leaf("state/v", (2,)), mesh_shape=(1, 1))
    rows = rows_of(explain(pipeline_of(head, rest, bare, stage_of(3))), "Stages (forward and backward per microbatch)")
    assert [row[5] for row in rows] == ["block_0, head (part)", "head (part)", "w, v", "-"]
    assert [row[2] for row in rows] == ["0", "1", "2", "24-31"]


def test_the_table_of_transfers_holds_each_and_their_sum():
    rows = rows_of(explain(pipeline_of(*two_stages(), transfers=TRANSFERS)), "Transfers between meshes per step")
    assert rows == [
        ["stage 0", "stage 1", "forward", "4", "1.0 KiB", "4.0 KiB", "1.00 ms", "4.00 ms"],
        ["stage 1", "stage 0", "backward", "4", "2.0 KiB", "8.0 KiB", "2.00 ms", "8.00 ms"],
        ["stage 0", "stage 1", "update", "1", "4 B", "4 B", "1.00 us", "1.00 us"],
        ["all", "9", "12.0 KiB", "12.0 ms"],
    ]
    assert "Transfers" not in explain(pipeline_of(*two_stages()))


def test_each_stage_has_its_own_strategies_and_what_it_receives_forward_is_its_batch():
    sent = leaf(SENT, (16, 64), (("x",), ()), role="other")
    first = stage_of(0, leaf(LAYER.format(0), (32, 32), ((), ("y",))), BATCH)
    text = explain(pipeline_of(first, stage_of(1, leaf(LAYER.format(1), (32, 32)), sent)))
    assert "- stage 0: tensor parallel over y, 4 ways: 1 of 1 parameters (100% of their bytes) split" in text
    assert f"- stage 1: data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}" in text


def test_leaves_that_a_stage_reads_of_other_meshes_are_told_and_are_not_its_parameters():
    borrowed = leaf(LAYER.format(0), (32, 32))
    second = stage_of(1, leaf(LAYER.format(1), (32, 32)), borrowed, leaf(SENT, (16, 64), (("x",), ()), role="other"))
    second = dataclasses.replace(second, leaves=(LAYER.format(1),))
    text = explain(pipeline_of(stage_of(0, borrowed, BATCH), second))
    assert (
        "- stage 1: reads 1 leaf of other meshes, 4.0 KiB per device, once per step: state/params/block_0/up\n" in text
    )
    assert f"- stage 1: data parallel over x, 2 ways: the batch split by example, {ALL_WHOLE}" in text
    assert "- stage 0: reads" not in text
    on_one_mesh = dataclasses.replace(second, mesh=0)
    assert "of other meshes" not in explain(pipeline_of(stage_of(0, borrowed, BATCH), on_one_mesh, virtual_stages=2))


def test_full_adds_the_tables_of_each_stage():
    plan = pipeline_of(*two_stages())
    text = explain(plan, full=True)
    first, second = text.split("\nStage 0, mesh x=2, y=4\n")[1].split("\nStage 1, mesh x=2, y=4\n")
    assert [row[0] for row in rows_of(first, "Parameters and state")] == [LAYER.format(0), LAYER.format(1), "all"]
    assert [row[0] for row in rows_of(second, "Parameters and state")][-2:] == [NORM, "all"]
    assert "Parameters and state" not in explain(plan)


def test_a_picture_of_the_schedule_is_printed_as_it_is_given():
    picture = "mesh 0 | F0 [bold] " + "F1 " * 60 + "\n"
    assert f"\nSchedule (columns are not to scale)\n{picture.rstrip()}\n" in explain(
        pipeline_of(*two_stages()), schedule_grid=picture
    )
    assert "Schedule (" not in explain(pipeline_of(*two_stages()))


def test_microbatches_on_one_mesh_are_told():
    assert "(8 devices) on cluster cpu, in 4 microbatches\n" in explain(plan_of(BATCH, num_microbatches=4))
    assert "microbatches" not in explain(plan_of(BATCH))
