"""What a step does more than another: the seconds add up, and the text says all of them."""

import dataclasses

import pytest

from autopar.why.added import BESIDE, Added, added_text, additions, not_waited_for
from tests.explain.test_pipelines import pipeline_of, two_stages
from tests.plan_examples import collective, plan_of

MESH = plan_of(
    collectives=(collective("all-reduce", "y"),), mesh_shape=(2, 2), compute_s=2e-3, comm_s=1e-3, hidden_s=0.0
)
STAGES = pipeline_of(*two_stages(), num_microbatches=2)


def test_the_text_names_two_of_what_is_added_and_of_what_is_saved_and_sums_up_the_others():
    added = [Added(f"a{number}", number * 1e-6) for number in (4, 3, 2, 1)]
    saved = [Added(f"s{number}", -number * 1e-6) for number in (5, 4, 3, 2)]
    assert added_text([*added, *saved]) == (
        "adds 4.00 us of a4, 3.00 us of a3 and 3.00 us in 2 more; saves 5.00 us of s5, 4.00 us of s4 and 5.00 us in 2 more"
    )
    assert added_text(added[:3]) == "adds 4.00 us of a4, 3.00 us of a3 and 2.00 us of a2"
    assert added_text(()) == ""


def test_what_a_stage_does_while_the_step_waits_for_another_is_said_not_to_count():
    slower = [Added("all-gather over x at ffn", 64e-6), Added("compute", -9e-6), Added(BESIDE, -55e-6)]
    assert added_text(slower).endswith(
        "; 55.0 us of that is done beside the work of other stages, and the step does not wait for it"
    )
    faster = [Added("compute", -9e-6), Added(BESIDE, 9e-6)]
    assert added_text(faster).endswith(
        "; 9.00 us of that was done beside the work of other stages, and the step gains nothing by it"
    )
    assert added_text([Added("compute", 1e-6), Added(BESIDE, 2e-6)]).endswith(
        "; stages wait for each other 2.00 us more"
    )
    assert not_waited_for(slower) == pytest.approx(55e-6)
    assert not_waited_for(slower[:2]) == 0


def test_additions_add_up_to_the_difference_of_the_steps():
    other = dataclasses.replace(MESH, compute_s=3.5e-3, comm_s=0.0, collectives=())
    found = additions(MESH, other, "ffn")
    assert sum(one.seconds for one in found) == pytest.approx(0.5e-3)
    first, *stages = STAGES.stages
    busier = dataclasses.replace(first, plan=dataclasses.replace(first.plan, compute_s=first.plan.compute_s + 1e-4))
    (compute, beside) = additions(STAGES, dataclasses.replace(STAGES, stages=(busier, *stages)), "ffn")
    assert (compute.what, compute.seconds) == ("compute", pytest.approx(1e-4))
    assert (beside.what, beside.seconds) == (BESIDE, pytest.approx(-1e-4))
