"""Cross-validation by hand: a group is priced with the constant that the other groups give."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from autopar.cost_model.hardware import preset
from autopar.simulate.closed_forms.job_prediction import predict
from autopar.simulate.closed_forms.prices import InTraining
from autopar.simulate.closed_forms.training_job import TrainingJob
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from tests.benchmarks.scripts import load_script

SHAPE = TransformerShape(
    family="gpt", layers=8, hidden=4096, heads=32, kv_heads=32, ffn_hidden=16384, vocab=51200, seq_len=2048
)


@pytest.fixture(scope="module")
def held_out() -> Iterator[ModuleType]:
    """The benchmark's module, which is no part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        yield load_script("held_out", patch)


def test_a_group_is_tried_with_what_the_others_give(held_out):
    """Two tables that were 'measured' at 0.90 and at 0.96 give each other's constant, and so each other's error."""
    runs = []
    for table, matrix in (("slow", 0.90), ("quick", 0.96)):
        for batch in (16, 32, 64):
            job = TrainingJob(
                shape=SHAPE, devices=1, global_batch=batch, microbatch=2, data_ranks=1, tensor_ranks=1, stages=1,
                virtual_stages=1,
            )  # fmt: skip
            cluster = preset("dgx-a100-80gb" if table == "slow" else "dgx-h100")
            step = predict(cluster, job, reached=InTraining(matrix)).step
            runs.append(held_out.Run(table, cluster, job, step.step_s))
    found = {one.name: one for one in held_out.held_out(runs) if one.kind == "table"}
    assert (found["slow"].matrix, found["quick"].matrix) == (0.96, 0.90)
    assert 0.03 < found["slow"].mean_error < 0.07
    assert found["slow"].tau == found["quick"].tau == 1.0
    assert [one.rows for one in held_out.held_out(runs)] == [3, 3, 3, 3]  # all are of one size


def test_tau_counts_pairs_in_order_and_leaves_ties_out(held_out):
    assert held_out.kendall_tau([1, 2, 3], [10, 20, 30]) == 1.0
    assert held_out.kendall_tau([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    assert held_out.kendall_tau([1, 1, 2], [5, 6, 7]) == 1.0
    assert held_out.kendall_tau([1], [2]) is None
