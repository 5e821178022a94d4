"""The parts of many rows are planned once, side by side, on no more data ranks than make a difference."""

import dataclasses
from fnmatch import fnmatch
from pathlib import Path

import pytest

from autopar.cost_model.hardware import preset
from autopar.simulate import planned_parts
from autopar.simulate.closed_forms.job_prediction import Part, predict
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.part_constraints import DATA
from autopar.simulate.planned_parts import PartPlanner, planned_prediction
from autopar.simulate.rows import Row, read_table

YARDSTICK = Path(__file__).parent.parent / "data" / "yardstick" / "published_steps.csv"
CLUSTER = preset("dgx-a100-80gb")
SHAPE = TransformerShape(
    family="gpt", layers=2, hidden=512, heads=8, kv_heads=8, ffn_hidden=2048, vocab=4096, seq_len=256
)
JOB = TrainingJob(
    shape=SHAPE, devices=4, global_batch=4, microbatch=2, data_ranks=2, tensor_ranks=2, stages=1, virtual_stages=1
)


def test_data_ranks_make_no_difference_to_a_planned_part():
    """Without ZeRO 2 or 3: what is planned for one rank and a few samples is what each of many ranks does."""
    planner, split = PartPlanner(), LayerSplit(samples=2, tensor_ranks=2)
    alone, many = (
        planner.plan(CLUSTER, Part(kind="plain", shape=SHAPE, split=split, data_ranks=ranks), JOB) for ranks in (1, 4)
    )
    assert alone.work.contraction_s == pytest.approx(many.work.contraction_s)
    assert alone.work.other_s == pytest.approx(many.work.other_s, rel=1e-3)
    assert alone.exchanges == many.exchanges
    assert (alone.kept_bytes, alone.scores_bytes, alone.again_bytes) == (
        many.kept_bytes, many.scores_bytes, many.again_bytes
    )  # fmt: skip


@pytest.mark.parametrize(("when", "shared"), [("usual", True), ("each", True), ("once", False)])
def test_gradients_that_are_reduced_once_a_step_are_whole_in_a_planned_part(when, shared, monkeypatch):
    """Under ZeRO 3; its parameters are shared among the data ranks either way."""
    stated = []
    monkeypatch.setattr(planned_parts, "plan_part", lambda _cluster, _part, step, **_: stated.append(step.constraints))
    part = Part(kind="plain", shape=SHAPE, split=LayerSplit(samples=1), data_ranks=8)
    PartPlanner().plan(CLUSTER, part, dataclasses.replace(JOB, zero_stage=3, reduce_gradients=when))
    layouts = {rule.glob: rule.layout for rule in stated[0].rules}
    for place, expected in (("params", True), ("grads", shared)):
        (kernel,) = (layout for glob, layout in layouts.items() if fnmatch(glob, f"state/{place}/*/up/kernel"))
        assert (DATA in kernel) == expected


@pytest.mark.sweep
def test_parts_planned_ahead_are_those_that_are_asked_for():
    rows = [row for row in read_table(YARDSTICK) if isinstance(row, Row) and row.id in ("sc21-1.7B", "sc21-3.6B")]
    jobs = [(row.cluster, predict(row.cluster, row.job).job) for row in rows]
    ahead, asked = PartPlanner(), PartPlanner()
    ahead.plan_ahead(jobs, processes=2)
    plans = ahead.plans
    assert plans == 6  # a layer, the embedding and the head of each
    for cluster, one in jobs:
        assert ahead.predict(cluster, one) == asked.predict(cluster, one)
    assert ahead.plans == asked.plans == plans


def test_what_cannot_be_planned_ahead_says_why_when_it_is_asked_for():
    shape, planner = dataclasses.replace(SHAPE, kv_heads=SHAPE.heads // 2), PartPlanner()
    odd = dataclasses.replace(JOB, shape=shape)
    planner.plan_ahead([(CLUSTER, odd)], processes=1)
    assert planner.plans == 0
    assert "column 'kv_heads'" in planned_prediction(planner, CLUSTER, odd)[1]
