"""A step's seconds, bytes and overlap, by hand on machines with round figures."""

import dataclasses

import pytest

from autopar.cost_model.device import AttentionSpeed, Device, MatrixEfficiency
from autopar.cost_model.machine import Cluster, Overlap
from autopar.cost_model.overlap import alone, beside, overlap_ratio, sum_by_kind
from autopar.cost_model.thread_blocks import ThreadBlocks
from autopar.cost_model.tiers import Tier
from autopar.simulate.closed_forms.memory import StateBytes
from autopar.simulate.closed_forms.operations import Exchange, FusedGroup, MatrixProduct, Work
from autopar.simulate.closed_forms.prices import InTraining, StagePrices
from autopar.simulate.closed_forms.stage_work import StageWork, StepPlan
from autopar.simulate.closed_forms.training_step import predict_step

AS_MEASURED = InTraining()
PEAKS = {"float16": 1e12, "float32": 1e11}
DEVICE = Device(name="round", peak_flops_per_s=PEAKS, memory_bytes=1e9, memory_bytes_per_s=1e9)
"""10^12 FLOP/s, 10^9 bytes/s, 1 GB."""


def machine(**hidden: float) -> Cluster:
    """Nodes of four devices at 10^8 bytes/s, joined by one port of 10^7 bytes/s; no latency."""
    inside = Tier(name="inside", devices=4, topology="switch", latency_s=0.0, bytes_per_s=1e8)
    outside = Tier(name="outside", devices=None, topology="switch", latency_s=0.0, bytes_per_s=1e7)
    return Cluster(name="round", device=DEVICE, tiers=(inside, outside), overlap=Overlap(hidden))


PLAN = StepPlan(microbatches=4, precision="fp16", states=StateBytes(2, 2, 12))
PRODUCT = MatrixProduct(m=1000, n=1000, k=500_000)  # 10^12 FLOPs: 1 s, and 2 x 1.001 x 10^9 bytes: more than 2 s


def prices(tensor: int = 1, *, cluster: Cluster | None = None) -> StagePrices:
    return StagePrices(
        cluster=cluster or machine(), dtype="float16", element_bytes=2, mesh=(1, 1, 1, 1, tensor), reached=AS_MEASURED
    )


def test_a_product_takes_the_longer_of_arithmetic_and_traffic():
    square = MatrixProduct(m=10_000, n=10_000, k=10_000)  # 2 x 10^12 FLOPs, 6 x 10^8 bytes
    assert prices().product_s(square) == pytest.approx(2.0)
    assert prices().product_s(PRODUCT) == pytest.approx(2 * (500e6 + 500e6 + 1e6) / 1e9)


def test_a_product_of_odd_width_is_multiplied_in_whole_tiles_and_padded_first():
    blocks = ThreadBlocks(multiprocessors=1, tiles=((64, 64),), aligned_bytes=16, formats=("float16",))
    device = dataclasses.replace(DEVICE, thread_blocks=blocks, memory_bytes_per_s=1e10)
    odd = prices(cluster=dataclasses.replace(machine(), device=device))
    even = odd.product_s(MatrixProduct(m=6400, n=6400, k=6400))
    assert even == pytest.approx(2 * 6400**3 / 1e12)
    assert odd.product_s(MatrixProduct(m=6400, n=6344, k=6400)) == pytest.approx(even)
    assert odd.product_s(MatrixProduct(m=6400, n=6343, k=6400)) == pytest.approx(even + 4 * 6343 * 6400 / 1e10)
    assert odd.product_s(MatrixProduct(m=6400, n=6343, k=6400, convolution=True)) < even


def test_extra_bytes_of_a_product_count_as_traffic():
    thin = MatrixProduct(m=1000, n=1000, k=1, extra_bytes=3e9)
    assert prices().product_s(thin) == pytest.approx(3.0, rel=1e-2)


def test_a_small_product_reaches_less_and_training_less_than_a_loop():
    device = dataclasses.replace(DEVICE, matrix_efficiency={"float16": MatrixEfficiency(0.5, (0.0, 0.0, 10_000.0))})
    cluster = dataclasses.replace(machine(), device=device)
    square = MatrixProduct(m=10_000, n=10_000, k=10_000)
    assert prices(cluster=cluster).product_s(square) == pytest.approx(2.0 / 0.25)
    trained = StagePrices(
        cluster=cluster,
        dtype="float16",
        element_bytes=2,
        mesh=(1, 1, 1, 1, 1),
        reached=InTraining(matrix=0.8, memory=0.5),
    )
    assert trained.product_s(square) == pytest.approx(2.0 / 0.25 / 0.8)
    assert trained.fused_s(1e9) == pytest.approx(2.0)


def test_a_convolution_has_an_efficiency_of_its_own_where_the_device_states_one():
    device = dataclasses.replace(
        DEVICE,
        matrix_efficiency={"float16": MatrixEfficiency(0.5)},
        convolution_efficiency={"float32": MatrixEfficiency(0.25)},
    )
    square = MatrixProduct(m=10_000, n=10_000, k=10_000)
    window = dataclasses.replace(square, convolution=True)
    half = prices(cluster=dataclasses.replace(machine(), device=device))
    single = dataclasses.replace(half, dtype="float32")
    assert half.product_s(window) == half.product_s(square) == pytest.approx(2.0 / 0.5)
    assert single.product_s(window) == pytest.approx(20.0 / 0.25)
    assert single.product_s(square) == pytest.approx(20.0)


def test_an_exchange_costs_what_its_group_crosses():
    """An all-reduce of S bytes over 4 ranks inside a node: 2 (3/4) S/B."""
    assert prices(4).exchange_s("all-reduce", 1e8, "tensor") == pytest.approx(1.5)
    assert prices(4).exchange_s("all-gather", 1e8, "tensor") == pytest.approx(0.75)
    assert prices(1).exchange_s("all-reduce", 1e8, "tensor") == 0.0


def test_a_send_inside_a_node_is_faster_and_idle_neighbours_leave_their_port():
    one = StagePrices(cluster=machine(), dtype="float16", element_bytes=2, mesh=(8, 1, 1, 1, 1), reached=AS_MEASURED)
    assert one.send_s(1e7, crosses_node=False, split=False) == pytest.approx(0.1)
    assert one.send_s(1e7, crosses_node=True, split=False) == pytest.approx(1.0)
    four = StagePrices(cluster=machine(), dtype="float16", element_bytes=2, mesh=(2, 4, 1, 1, 1), reached=AS_MEASURED)
    assert four.send_s(1e7, crosses_node=True, split=False) == pytest.approx(4.0)


def test_tensor_ranks_send_parts_and_gather_where_that_is_cheaper():
    split = StagePrices(cluster=machine(), dtype="float16", element_bytes=2, mesh=(2, 1, 1, 1, 4), reached=AS_MEASURED)
    # Four ranks, one port: a quarter each takes 1 s in all, then the gather inside 3/4 x 10^7 / 10^8.
    assert split.send_s(1e7, crosses_node=True, split=True) == pytest.approx(1.0)
    assert split.send_s(1e7, crosses_node=True, split=False) == pytest.approx(1.075)


def stage(**changes: object) -> StageWork:
    """Two layers of 1 s forward and 2 s backward."""
    work = Work(forward=(FusedGroup(1e9),), backward=(FusedGroup(2e9),), parameters=1e6, kept_bytes=1e7)
    return dataclasses.replace(StageWork(layers=((work, 2),), data_ranks=1), **changes)


def test_one_stage_takes_its_layers_for_every_microbatch_and_the_optimizer_once():
    found = predict_step(machine(), PLAN, [stage()], reached=AS_MEASURED)
    assert found.compute_s == pytest.approx(4 * 2 * 3.0)
    assert found.optimizer_s == pytest.approx(2e6 * 54 / 1e9)
    assert found.step_s == pytest.approx(24.0 + 0.108)
    assert found.comm_s == 0


def test_what_is_recomputed_runs_again_before_backward():
    work = Work(forward=(FusedGroup(1e9),), backward=(FusedGroup(2e9),), recomputed=(FusedGroup(1e9),))
    found = predict_step(machine(), PLAN, [StageWork(layers=((work, 1),), data_ranks=1)], reached=AS_MEASURED)
    assert found.step_s == pytest.approx(16.0)


def test_a_fused_attention_kernel_runs_as_it_was_measured_at_its_width_and_length():
    """No scores are moved; half speed where a query sees as many keys as `half`; half a tile is idle for half the width."""
    speed = AttentionSpeed(width=64, forward_flops_per_s=1e12, backward_flops_per_s=5e11, backward_half_keys=1000)
    device = dataclasses.replace(DEVICE, attention=(speed,), sustained={"float16": 0.5}, memory_bytes_per_s=1e10)
    kernel = MatrixProduct(m=1000, n=1000, k=64, batch=1000, attention="forward")
    on_chip = prices(cluster=dataclasses.replace(machine(), device=device))
    flops = 2 * 64 * 1e9
    assert on_chip.product_s(kernel) == pytest.approx(flops / 1e12)
    assert on_chip.product_s(dataclasses.replace(kernel, attention="backward")) == pytest.approx(flops / 2.5e11)
    assert on_chip.product_s(dataclasses.replace(kernel, k=32)) == pytest.approx(flops / 2 / 5e11)
    square = MatrixProduct(m=10_000, n=10_000, k=10_000)
    assert on_chip.product_s(square) == pytest.approx(2 * prices().product_s(square))


def test_stages_add_a_bubble_and_sends():
    work = Work(forward=(FusedGroup(1e9),), backward=(FusedGroup(2e9),), boundary_bytes=1e7)
    stages = [StageWork(layers=((work, 1),), data_ranks=1)] * 2
    found = predict_step(machine(), PLAN, stages, reached=AS_MEASURED)
    # Each stage sends once per microbatch, 0.1 s inside a node: 4 x 3.1 s, and 3.1 s of the other stage.
    assert found.bubble_s == pytest.approx(3.1)
    assert found.step_s == pytest.approx(5 * 3.1)
    assert found.communication["pipeline"].total_s == pytest.approx(0.4)


def test_gradients_are_reduced_once_and_hide_behind_the_last_backward_pass():
    # 2 x 10^6 parameters of 2 bytes over 4 ranks in a node: 2 (3/4) 4 x 10^6 / 10^8 = 0.06 s.
    exposed = predict_step(machine(), PLAN, [stage(data_ranks=4)], reached=AS_MEASURED)
    assert exposed.communication["data_parallel"].exposed_s == pytest.approx(0.06)
    hidden = predict_step(machine(data_parallel=0.75), PLAN, [stage(data_ranks=4)], reached=AS_MEASURED)
    part = hidden.communication["data_parallel"]
    # One layer's gradients come in two buckets, of which the last has nothing beside it.
    assert (part.total_s, part.exposed_s) == (pytest.approx(0.06), pytest.approx(0.03))
    assert overlap_ratio(part) == pytest.approx(0.5)
    assert exposed.step_s - hidden.step_s == pytest.approx(0.03)


def test_buckets_are_as_late_as_the_slower_of_both_pipes():
    """Ten layers of c = 0.006 s of reductions, b = 2 s or 0.004 s of backward: c, or c + 9 (c - b), stands alone."""
    quick = Work(forward=(), backward=(FusedGroup(4e6),), parameters=2e5)
    for work, exposed_s in ((dataclasses.replace(quick, backward=(FusedGroup(2e9),)), 0.006), (quick, 0.024)):
        stages = [StageWork(layers=((work, 10),), data_ranks=4)]
        plan = dataclasses.replace(PLAN, overlap="gradients")
        part = predict_step(machine(), plan, stages, reached=AS_MEASURED).communication["data_parallel"]
        assert (part.total_s, part.exposed_s) == (pytest.approx(0.06), pytest.approx(exposed_s))
        plan = dataclasses.replace(PLAN, overlap="none")
        part = predict_step(machine(data_parallel=1.0), plan, stages, reached=AS_MEASURED).communication[
            "data_parallel"
        ]
        assert part.exposed_s == part.total_s


def test_a_collective_cut_up_with_its_product_leaves_one_piece_alone():
    """Four ranks, four pieces: a quarter of 1.5 s beside 9 s of compute; a file that lets nothing hide leaves all of it."""
    exchange = Exchange(kind="all-reduce", group="tensor", full_bytes=1e8)
    work = Work(forward=(), backward=(FusedGroup(9e9), exchange))
    stages = [StageWork(layers=((work, 1),), data_ranks=1, tensor_ranks=4)]
    exposed = {}
    for option in ("usual", "gradients", "all"):
        plan = dataclasses.replace(PLAN, microbatches=1, overlap=option)
        exposed[option] = predict_step(machine(), plan, stages, reached=AS_MEASURED).communication["tensor"].exposed_s
    assert exposed == {"usual": pytest.approx(1.5), "gradients": pytest.approx(1.5), "all": pytest.approx(0.375)}


@pytest.mark.parametrize(
    ("zero_stage", "data_s", "gather_s"),
    [
        (0, 0.06, 0.0),
        (1, 0.03 + 0.03, 0.0),  # scatter of gradients, gather of parameters, once
        (2, 4 * 0.03 + 0.03, 0.0),  # a scatter for every microbatch
        (3, 4 * 0.03, 4 * 2 * 0.03),  # and parameters gathered in forward and in backward
    ],
)
def test_zero_stages_communicate_as_they_divide(zero_stage, data_s, gather_s):
    plan = dataclasses.replace(PLAN, zero_stage=zero_stage)
    found = predict_step(machine(), plan, [stage(data_ranks=4)], reached=AS_MEASURED)
    assert found.communication["data_parallel"].total_s == pytest.approx(data_s)
    assert found.communication["zero3"].total_s == pytest.approx(gather_s)
    owners = 4 if zero_stage else 1
    assert found.optimizer_s == pytest.approx(2e6 * 54 / 1e9 / owners)


def test_experts_are_reduced_only_over_ranks_that_share_them():
    work = Work(forward=(), backward=(FusedGroup(1e9),), parameters=2e6, expert_parameters=1e6)
    found = predict_step(
        machine(), PLAN, [StageWork(layers=((work, 1),), data_ranks=4, expert_ranks=2)], reached=AS_MEASURED
    )
    # 10^6 dense parameters over 4 ranks, 10^6 of experts over the 2 that hold the same ones.
    assert found.communication["data_parallel"].total_s == pytest.approx(2 * 2e6 / 1e8 * (3 / 4 + 1 / 2))


def test_a_collective_behind_a_product_hides_as_far_as_the_cluster_lets_it():
    exchange = Exchange(kind="all-reduce", group="tensor", full_bytes=1e8, behind="product")  # 1.5 s over four ranks
    work = Work(forward=(), backward=(exchange, MatrixProduct(m=10_000, n=10_000, k=5_000)))  # 1 s
    one = dataclasses.replace(PLAN, microbatches=1)
    stages = [StageWork(layers=((work, 1),), data_ranks=1, tensor_ranks=4)]
    part = predict_step(machine(tensor=1.0), one, stages, reached=AS_MEASURED).communication["tensor"]
    assert (part.total_s, part.exposed_s) == (pytest.approx(1.5), pytest.approx(0.5))
    part = predict_step(machine(), one, stages, reached=AS_MEASURED).communication["tensor"]
    assert part.exposed_s == pytest.approx(1.5)


def test_interference_slows_what_runs_beside_communication():
    overlap = Overlap({"zero3": 1.0}, interference=0.1)
    assert beside(overlap, "zero3", comm_s=2.0, compute_s=10.0).exposed_s == pytest.approx(0.2)


def test_ratios_are_of_each_kind_and_none_without_communication():
    found = sum_by_kind([alone("tensor", 3.0), beside(Overlap({"tensor": 1.0}), "tensor", comm_s=1.0, compute_s=9.0)])
    assert overlap_ratio(found["tensor"]) == pytest.approx(0.25)
    assert overlap_ratio(found["pipeline"]) is None
    assert set(found) == {"data_parallel", "zero3", "tensor", "pipeline", "context", "expert"}


def test_memory_is_states_activations_in_flight_and_what_recomputation_brings_back():
    work = Work(forward=(), backward=(), parameters=1e6, kept_bytes=1e7, transient_bytes=5e7)
    stages = [StageWork(layers=((work, 2),), data_ranks=1)] * 3
    found = predict_step(machine(), PLAN, stages, reached=AS_MEASURED).memory
    assert found.states_bytes == 2e6 * 16
    assert found.activation_bytes == 3 * 2 * 1e7  # three microbatches in flight on the first stage
    assert found.peak_bytes == 32e6 + 6e7 + 5e7
    assert found.stage == 0


def test_a_step_fits_if_its_peak_is_within_the_usable_memory():
    cluster = dataclasses.replace(machine(), device=dataclasses.replace(DEVICE, reserved_bytes=0.5e9))
    small = Work(forward=(), backward=(), kept_bytes=0.4e9)
    large = Work(forward=(), backward=(), kept_bytes=0.6e9)
    one = dataclasses.replace(PLAN, microbatches=1)
    assert predict_step(cluster, one, [StageWork(layers=((small, 1),), data_ranks=1)]).fits
    assert not predict_step(cluster, one, [StageWork(layers=((large, 1),), data_ranks=1)]).fits
