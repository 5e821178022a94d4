"""The report of a pipeline says how its stages lay out their values, once for stages that are alike."""

import io

import pytest
from rich.console import Console

from autopar.explain import explain, show
from autopar.explain.paths import starred
from autopar.explain.stage_layouts import as_shown, pipeline_layouts, sent_text
from autopar.explain.stages import group_stages
from autopar.plan import ValuePlan
from tests.explain.test_pipelines import pipeline_of, stage_of
from tests.plan_examples import leaf


def equal_stage(number):
    """A stage with one layer: its parameter, what Adam keeps of it, and what the stage before sends."""
    leaves = [leaf(f"state/{words}/block_{number}/up", (8, 16), (("x",), ())) for words in ("params", "mu")]
    taken = leaf(f"received float32[16,8] of forward {number - 1}", (16, 8), role="other")
    names = tuple(value.path for value in leaves)
    return stage_of(number, *leaves, *([taken] if number else []), mesh_shape=(2, 1), leaves=names)


@pytest.fixture(scope="module")
def plan():
    return pipeline_of(*map(equal_stage, range(16)))


def rows_of(table):
    return list(zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True))


def printed(plan, width, **how):
    stream = io.StringIO()
    show(plan, Console(file=stream, width=width, color_system=None), **how)
    return stream.getvalue().splitlines()


def test_a_number_that_all_parts_share_stays_and_others_become_a_star():
    own = ["state/params/block_2/up", "state/opt/1/mu/block_2/up", "state/params/w[0:2]"]
    other = ["state/params/block_4/up", "state/opt/1/mu/block_4/up", "state/params/w[2:4]"]
    assert list(starred(own, [other]).values()) == [
        "state/params/block_*/up",
        "state/opt/1/mu/block_*/up",
        "state/params/w[*]",
    ]
    assert starred(own, []) == {name: name for name in own}


@pytest.mark.parametrize(
    ("path", "role", "said"),
    [
        ("received float32[4,8] of forward 1", "other", "activations from the stage before"),
        ("received float32[4,8] of forward 0", "other", "activations from stage 0"),
        ("received float32[4,8] of backward 3", "other", "gradients from the next stage"),
        ("received float32[4,8] of backward 2", "output", "gradients for the stages before"),
        ("exchanged float32[] of update 5.0", "other", "values from other stages' updates"),
        ("exchanged float32[8] of backward 15", "other", "sums over microbatches from stage 15"),
        ("state/params/up", "state", ""),
    ],
)
def test_what_stages_send_each_other_has_plain_words(path, role, said):
    assert sent_text(ValuePlan(path=path, role=role, shape=(), dtype="float32", spec=(), bytes_per_device=4), 2) == said


def test_the_layouts_of_sixteen_equal_stages_are_a_few_rows_with_axis_names(plan):
    state, sent, _ = map(rows_of, pipeline_layouts(plan))
    assert ("state/params/block_{0..15}/up", "0 to 15", "16", "(8, 16)", "float32", "[x, -]", "256 B") in state
    assert [row[0] for row in state if "mu" in row[0]] == [], "the optimizer's leaves lie as their parameters: one row"
    assert [row[:3] for row in state if row[5] == "as their parameters"] == [
        ("optimizer's state, of a stage in all", "0 to 15", "16")
    ]
    assert [row[:2] for row in sent] == [("-> 1/loss", "0 to 15"), ("activations from the stage before", "1 to 15")]


def test_a_group_of_equal_stages_is_named_for_all_of_them(plan):
    group = next(group for group in group_stages(plan) if len(group) > 1)
    assert [value.path for value in as_shown(group).inputs if value.role == "state"] == [
        "state/params/block_*/up",
        "state/mu/block_*/up",
    ]


def test_the_full_report_prints_equal_stages_once(plan):
    lines = printed(plan, 80, full=True)
    heads = [line for line in lines if line.startswith("Stage") and ": mesh" in line]
    assert heads == ["Stage 0: mesh x=2, y=1", "Stages 1 to 15, each: mesh x=2, y=1"]
    assert any("state/params/block_*/up" in line for line in lines)


def test_the_report_of_sixteen_stages_fits_three_pages(plan):
    assert len(printed(plan, 80)) < 150
    assert "received" not in explain(plan)
    assert len(str(plan).splitlines()) <= 40
    assert max(map(len, str(plan).splitlines())) <= 80
