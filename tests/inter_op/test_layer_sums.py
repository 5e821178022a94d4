"""What the search counts of a stage before it is planned: seconds and bytes of its layers, also of those that are done again."""

import jax
import numpy as np
import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op import search_pipeline
from autopar.inter_op.candidates.layer_figures import LayerFigures, carry_over
from autopar.inter_op.layer_sums import (
    CostCase,
    Repetition,
    executable_bytes,
    in_flight_bytes,
    microbatch_seconds,
    repetitions,
    standing_bytes,
    working_bytes,
)
from autopar.inter_op.plan_pipeline import PipelineWishes
from autopar.intra_op.memory import tuning as memory_tuning
from autopar.models import registry
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from tests.inter_op.test_search import request_on

MARGIN = memory_tuning.TUNING.temporaries_margin
LAYERS = 4
BY_LAYERS, AT_ONCE = repetitions([1.0])


def of_all(array):
    return float(array[0, LAYERS])


def layers_with(**figures):
    return [LayerFigures(**figures)] * LAYERS


@pytest.mark.parametrize(
    ("again", "in_flight", "needed"),
    [
        (Repetition(), 4 * 34, 3),  # everything is kept, and one layer's temporaries are there at a time
        (BY_LAYERS, 4 * 2, 20),  # layers keep what they received, and one is done again at a time
        (AT_ONCE, 2, 4 * 17 + 3),  # the first keeps what it received, and all are there, as in one task
        (Repetition(0.5, True), (4 * 2 + 4 * 34) / 2, 20),
    ],
)
def test_stages_keep_what_they_do_not_do_again(again, in_flight, needed):
    figures = layers_with(received_bytes=2.0, residual_bytes=34.0, passing_bytes=3.0, within_bytes=20.0)
    assert of_all(in_flight_bytes(figures, CostCase(8, again), 1)) == in_flight
    assert of_all(working_bytes(figures, again)) == needed
    all_within = LAYERS * 17 + 3
    within = (1 - again.share) * all_within + again.share * (20 if again.by_layers else all_within)
    assert of_all(executable_bytes(figures, again)) == pytest.approx(within / MARGIN)


def test_layers_of_a_scan_make_their_gradients_together_and_are_done_again_together():
    """A layer that is none of a scan has its own temporaries at another time."""
    piece = LayerFigures(
        residual_bytes=34.0, passing_bytes=5.0, within_bytes=20.0, stacked_bytes=2.0, joined_bytes=15.0
    )
    figures = [LayerFigures(residual_bytes=34.0, passing_bytes=3.5, within_bytes=17.0), *[piece] * (LAYERS - 1)]
    assert of_all(working_bytes(figures, Repetition())) == 3 * 2 + 3.5
    assert of_all(working_bytes(figures, BY_LAYERS)) == 3 * (15 + 2) + 17
    assert of_all(working_bytes(figures, AT_ONCE)) == 3 * 15 + 13.5 + 3 * 2 + 3.5
    carried = carry_over({4: piece}, 8, share=0.0)
    assert (carried.joined_bytes, carried.stacked_bytes) == (7.5, 2.0), (
        "gradients are as large however few the examples"
    )


def test_what_stands_in_the_loop_has_a_margin_in_one_executable_alone():
    figures = layers_with(kept_bytes=100.0, looped_bytes=40.0, beside_bytes=50.0, passing_bytes=1.0, within_bytes=1.0)
    assert of_all(standing_bytes(figures)) == LAYERS * 140
    assert of_all(executable_bytes(figures, Repetition())) == pytest.approx(LAYERS * 100 + (LAYERS * 50 + 1) / MARGIN)


def test_backward_makes_no_output_again_that_it_does_not_read():
    figures = layers_with(forward_s=10.0, again_s=7.0, backward_s=20.0)
    assert of_all(microbatch_seconds(figures, Repetition())) == 120
    assert of_all(microbatch_seconds(figures, BY_LAYERS)) == 120 + 4 * 7
    assert of_all(microbatch_seconds(figures, AT_ONCE)) == 120 + 3 * 10 + 7
    assert of_all(microbatch_seconds(figures, Repetition(0.5, True))) == 120 + 2 * 7
    assert np.all(np.tril(microbatch_seconds(figures, AT_ONCE)[:, :-1]) == 0), "no layers take no time"


def test_the_first_stage_of_a_split_backward_keeps_all_until_its_weight_gradients():
    """It has no input gradient. Another one lets go of what only that reads, and keeps its cotangents."""
    figures = layers_with(received_bytes=2.0, residual_bytes=10.0, late_residual_bytes=4.0, cotangent_bytes=5.0)
    flying = in_flight_bytes(figures, CostCase(8, Repetition(), split=True), 2)
    assert flying[0, 2] == 2 * 10 + 2
    assert flying[1, 3] == 2 * 4 + max(2 * 6, 2 * 5) + min(2 * 6, 2 * 5) / 2
    again = in_flight_bytes(figures, CostCase(8, BY_LAYERS, split=True), 2)
    assert again[0, 2] == 2 * 2 + 2
    assert again[1, 3] == 2 * 2 + 2 * (4 + 5)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("is_scanned", [False, True], ids=["unrolled", "scanned"])
def test_layers_add_up_to_the_stage_that_is_planned(is_scanned, recompute, monkeypatch):
    """Seconds and bytes; without what layers share, such as a task's call. A scan makes the gradients of all its layers
    before they are added up, and is done again as a whole."""
    sizes = {"layers": 6, "hidden": 512, "heads": 8, "seq": 256, "batch": 64, "vocab": 2048}
    model = registry.build("gpt", **sizes, scan_layers=is_scanned)
    state = jax.eval_shape(model.create_state, jax.eval_shape(lambda: jax.random.key(0)))
    signature = CallSignature(model.train_step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, (state, model.batch_shape()), {}))
    plan_found, hoped = search_pipeline.Wholes.plan, []

    def note(wholes, found):
        hoped.append(found.choice.stages)
        return plan_found(wholes, found)

    monkeypatch.setattr(search_pipeline.Wholes, "plan", note)
    wishes = PipelineWishes(num_stages=2, num_microbatches=8, schedule="1f1b", recompute=recompute)
    found = search_pipeline.search_pipeline(traced, wishes, request_on(preset("p3.16xlarge")), devices=4, num_stages=2)
    for by_layers, whole in zip(hoped[-1], found.pipeline.staged.stages, strict=True):
        assert by_layers.stage_s == pytest.approx(whole.forward_s + whole.backward_s, rel=0.05 if is_scanned else 0.04)
        assert whole.peak_bytes <= by_layers.peak_bytes * 1.02
        assert by_layers.peak_bytes <= 1.3 * whole.peak_bytes
