"""What the tasks of a planned stage need while they run, beside what XLA says of the compiled tasks."""

import jax
import pytest

import autopar
from autopar.intra_op.memory.compilers import XLA_CPU
from autopar.models import registry
from autopar.stages.tasks.cuts import cut_into_tasks
from autopar.stages.tasks.task_memory import TaskMemories

SIZES = {"layers": 6, "hidden": 64, "heads": 4, "seq": 64, "batch": 16, "vocab": 256, "dropout": 0.0}


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_tasks_of_scanned_layers_need_what_xla_needs(model):
    """What a scan stacks for the backward lies in the memory of the task's results from the start: it was counted twice."""
    sizes = SIZES if model == "gpt" else {name: size for name, size in SIZES.items() if name != "dropout"}
    built = registry.build(model, **sizes, scan_layers=True)
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b", "mesh_shape": (2,), "recompute": "none"}
    parallel = autopar.parallelize(built.train_step, devices=4, **options)
    compiled = parallel.compile(jax.eval_shape(built.create_state, jax.random.key(0)), built.batch_shape())
    executables = {str(name): one for name, one in compiled.executables().items()}
    for number, stage in enumerate(compiled.stages):
        planned = TaskMemories(stage.program, lambda stage=stage: stage.assignment, XLA_CPU).whole.working_bytes
        assert planned.keys() == {"forward", "backward"}
        for kind, working in planned.items():
            needed = executables[f"{kind} {number}"].memory_analysis().temp_size_in_bytes
            assert working == pytest.approx(needed, rel=0.25), (kind, number)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_peak_of_scanned_stages_is_what_xla_needs(schedule, recompute):
    """It was up to 40 % above."""
    built = registry.build("gpt", **SIZES, scan_layers=True)
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": schedule, "mesh_shape": (2,), "recompute": recompute}
    parallel = autopar.parallelize(built.train_step, devices=4, **options)
    found = parallel.verify(jax.eval_shape(built.create_state, jax.random.key(0)), built.batch_shape())
    peaks = [row for row in found.rows if (row.topic, row.what) == ("memory", "peak")]
    assert len(peaks) == 2
    for row in peaks:
        assert row.planned == pytest.approx(row.compiled, rel=0.1), row.stage


def test_forward_is_reckoned_once_for_a_whole_and_a_split_backward(monkeypatch):
    built = registry.build("gpt", **SIZES)
    parallel = autopar.parallelize(built.train_step, devices=4, num_stages=2, num_microbatches=4, mesh_shape=(2,))
    compiled = parallel.compile(jax.eval_shape(built.create_state, jax.random.key(0)), built.batch_shape())
    reckoned, reckon = [], TaskMemories._working_bytes
    monkeypatch.setattr(
        TaskMemories, "_working_bytes", lambda self, cut: (reckoned.append(cut.name.loop_kind), reckon(self, cut))[1]
    )
    for stage in compiled.stages:
        reckoned.clear()
        memories = TaskMemories(stage.program, lambda stage=stage: stage.assignment, XLA_CPU)
        split = memories.split.working_bytes
        assert {"forward", "weight_gradient"} <= split.keys()
        assert sorted(reckoned) == sorted(["backward", *split])
        cuts = cut_into_tasks(stage.program, stage.assignment, split_backward=True, kept=frozenset())
        assert split == {c.name.loop_kind: reckon(memories, c) for c in cuts if c.name.loop_kind is not None}
