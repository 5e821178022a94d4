"""The report of a pipeline says what fills each stage's peak: the parts add up to it."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.explain import explain
from autopar.explain.memory import parts_of_peak
from autopar.reports.html.pipeline_memory import memory_over_step
from tests.explain.test_pipelines import pipeline_of, stage_of
from tests.plan_examples import rows_of
from tests.schedules.chains import TRAINING_IN_ONE
from tests.why.test_leaf import MODES, SETTINGS, planned

GIB = 2**30
TITLE = "Memory at the peak"


def with_parts(number: int, **changes):
    parts = {"state_bytes": GIB, "sum_bytes": GIB // 2, "microbatch_bytes": GIB // 4, "microbatches_in_flight": 4}
    fields = {"peak_bytes": 3 * GIB, **parts, **changes}
    return stage_of(
        number, **{"in_flight_bytes": fields["microbatch_bytes"] * fields["microbatches_in_flight"], **fields}
    )


def test_the_parts_of_a_peak_are_told_and_equal_stages_share_a_row():
    report = explain(pipeline_of(*(with_parts(n, microbatches_in_flight=4 - n) for n in range(3))))
    rows = rows_of(report, f"{TITLE} (ranges from the least to the most)")
    assert [row[:6] for row in rows] == [
        ["0 to 2", "3.0 GiB", "1.0 GiB", "512.0 MiB", "512.0 MiB to 1.0 GiB", "512.0 MiB to 1.0 GiB"]
    ]
    assert rows[0][6] == "2 x logits, float32(16, 256)"


def test_a_plan_that_does_not_know_the_parts_has_no_such_table():
    assert TITLE not in explain(pipeline_of(stage_of(0), stage_of(1)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", TRAINING_IN_ONE)
def test_the_parts_of_planned_stages_add_up_to_their_peaks(schedule):
    plan = planned(**MODES["stages"] | {"schedule": schedule})
    for stage in plan.stages:
        assert sum(parts_of_peak(stage)) == stage.peak_bytes
        assert min(parts_of_peak(stage)) > 0
        here = sum(value.bytes_per_device for value in stage.plan.inputs if value.path in stage.leaves)
        assert stage.state_bytes >= here


def waves_step(state, batch):
    """Its layers keep more for their input gradients alone than weight gradients read."""

    def loss_of(params):
        x = batch["x"]
        for number, kernel in enumerate(params.values()):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.sin(jnp.sin(jnp.sin(jnp.sin(x @ kernel))))
        return jnp.mean(x)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss


def test_a_split_backward_keeps_less_of_later_microbatches_and_the_parts_still_add_up():
    """The last of four meshes has four microbatches in flight, and of three of them only what the weight gradient reads."""
    kernel, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    changes = {"mesh_shape": (1,), "num_stages": 4, "num_microbatches": 8, "schedule": "zb-h1"}
    step = autopar.parallelize(waves_step, **SETTINGS | MODES["stages"] | changes)
    plan = step.plan({f"layer_{n}": kernel for n in range(4)}, {"x": x})
    last = plan.stages[-1]
    assert last.microbatches_in_flight == 4
    assert last.in_flight_bytes < 4 * last.microbatch_bytes
    for stage in plan.stages:
        assert sum(parts_of_peak(stage)) == stage.peak_bytes == max(memory_over_step(plan, stage.mesh))
    assert plan.from_json(plan.to_json()) == plan
