"""What the search counts of a stage's memory whose backward does layers again, before any stage is planned."""

import functools

import pytest

from autopar.cost_model.hardware import preset
from autopar.inter_op.layer_costs import LayerCosts, _CostCase, _first_sizes, _in_flight_bytes, _working_bytes
from autopar.inter_op.planned_layers import LayerFigures
from autopar.intra_op.memory import tuning as memory_tuning
from tests.inter_op.test_search import request_on

MARGIN = memory_tuning.TUNING.temporaries_margin
LAYERS = 4


def bytes_of_stage(received, residual, share):
    """(in flight for each microbatch, what a task needs beside them with its margin) of all layers, which are alike."""
    figures = [LayerFigures(received_bytes=received, residual_bytes=residual)] * LAYERS
    case = _CostCase(8, share, False)
    needed = _working_bytes(figures, case)[0, LAYERS] + (1 - share) * LAYERS * residual
    return _in_flight_bytes(figures, case, 1)[0, LAYERS], needed * MARGIN


@pytest.mark.parametrize(
    ("received", "share", "in_flight", "needed"),
    [
        (2, 0.0, 4 * 34, 4 * 34),  # everything is kept
        (2, 1.0, 4 * 2, 34),  # layers keep what they received, and one is done again at a time
        (2, 0.5, (4 * 2 + 4 * 34) / 2, 2 * 34 + 34),  # half is kept
        (40, 1.0, 40, 4 * 34),  # layers hand on more than they keep: the stage is done again as a whole
    ],
)
def test_stages_keep_what_their_layers_received_where_that_is_less(received, share, in_flight, needed):
    assert bytes_of_stage(received, 34, share) == pytest.approx((in_flight, needed))


def test_layers_are_planned_at_first_on_submeshes_that_stages_can_have():
    """48 stages on 1,024 devices have 21 each or more, which no node has."""
    sizes = {1, 2, 4, 8, *(8 * nodes for nodes in range(1, 129))}
    request = request_on(preset("dgx-a100-80gb"))
    first = functools.partial(_first_sizes, layers=48, request=request)
    assert first(sizes, smallest_first=False) == {32}
    assert first(sizes, smallest_first=True) == {1}
    assert first({size for size in sizes if size <= 64}, smallest_first=False) == {1, 2, 4, 8}


def test_figures_carry_over_to_numbers_of_microbatches_that_divide_their_examples_no_further():
    """Of 1,024 examples, 512 microbatches have 2 each, which 32 devices divide in two; 256 have 4, which they divide in four."""
    costs = LayerCosts.__new__(LayerCosts)
    costs._examples, costs._sizes = 1024, {512: {32}}
    assert costs.is_planned(512, (4, 8))
    assert costs.is_planned(1024, (4, 8))
    assert not costs.is_planned(256, (4, 8))
    assert not costs.is_planned(512, (8, 8))
