"""How long stages wait for transfers, by formula: as the simulation of the schedule says."""

import pytest

from autopar.inter_op.dynamic_program.choose_stages import choose_stages
from autopar.inter_op.dynamic_program.problem import CostTable, StageCost, StageProblem
from autopar.schedules.schedules import make_schedule
from autopar.schedules.step_time import time_step


def simulated_s(name, stages, batches, sent_s):
    """Seconds of a step of equal stages of one second per microbatch, a third of it forward."""
    schedule = make_schedule(name, num_meshes=stages, num_microbatches=batches)
    is_split = "weight_gradient" in schedule.kinds
    back = "input_gradient" if is_split else "backward"
    each_s = {kind: 2 / 3 if kind == "backward" else 1 / 3 for kind in schedule.kinds}
    run_s = {(kind, stage): each_s[kind] for kind in schedule.kinds for stage in range(stages)}
    sent = {("forward", stage): sent_s / 2 for stage in range(stages - 1)}
    sent |= {(back, stage): sent_s / 2 for stage in range(1, stages)}
    return time_step(schedule, run_s, sent).makespan_s


def chosen(name, batches, costs, options, devices):
    return choose_stages(
        StageProblem(costs=costs, options=options, cluster=(1, devices), microbatches=batches, schedule=name)
    )


@pytest.mark.parametrize("sent_s", [0.0, 0.1, 0.5, 1.2])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "zb-h1"])
def test_equal_stages_take_as_long_as_simulated(name, stages, sent_s):
    costs = CostTable.of(stages, 1, lambda i, j, z: StageCost(seconds_per_microbatch=float(j - i), transfer_s=sent_s))
    fewer_s, more_s = (chosen(name, batches, costs, ((1, 1),), stages).step_s for batches in (64, 128))
    simulated = [simulated_s(name, stages, batches, sent_s) for batches in (64, 128)]
    assert more_s - fewer_s == pytest.approx(simulated[1] - simulated[0], rel=0.01), "of a microbatch"
    assert more_s == pytest.approx(simulated[1], rel=0.02), "all, with the first and the last"


def test_fewer_stages_are_chosen_where_a_schedule_waits_for_transfers():
    """Two layers on a device each, with a slow link between them, or both on two devices, which divide them badly."""

    def cost_of(i, j, z):
        return StageCost(seconds_per_microbatch=(j - i) * (1.0, 0.6)[z], transfer_s=1.0)

    costs = CostTable.of(2, 2, cost_of)
    numbers = {name: len(chosen(name, 64, costs, ((1, 1), (1, 2)), 2).stages) for name in ("1f1b", "eager-1f1b")}
    assert numbers == {"1f1b": 1, "eager-1f1b": 2}
