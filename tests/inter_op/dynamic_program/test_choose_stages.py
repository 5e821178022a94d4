"""The choice of stages is the best of all choices, and it says what it chose and why nothing else was possible."""

import dataclasses
import itertools
import math
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from autopar.errors import ArgumentError, OutOfMemoryError
from autopar.inter_op.dynamic_program.choose_stages import choose_faster_stages, choose_stages
from autopar.inter_op.dynamic_program.families import families_of
from autopar.inter_op.dynamic_program.problem import CostTable, Manual, StageChoice, StageCost, StageProblem
from autopar.inter_op.dynamic_program.recursion import exact
from autopar.inter_op.dynamic_program.submeshes import submeshes
from autopar.schedules.schedules import make_schedule
from autopar.schedules.tasks import task_times
from autopar.solver.budget import Budget
from tests.inter_op.dynamic_program.brute_force import brute_force, fits, in_flight, step_s
from tests.schedules.chains import TRAINING_IN_CHUNKS

SCHEDULES = (*TRAINING_IN_CHUNKS, ("inference", 1), ("interleaved", 3))


def problem_of(costs, options, cluster, microbatches, schedule="1f1b", virtual_stages=1, memory_bytes=math.inf):
    return StageProblem(
        costs=costs,
        options=options,
        cluster=cluster,
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        memory_bytes=memory_bytes,
    )


def table_of_arrays(*arrays):
    """Seconds, seconds once a step and of the transfer, bytes of weights, of activations, of a task that runs and in all."""
    return CostTable(**{field.name: array for field, array in zip(dataclasses.fields(CostTable), arrays, strict=True)})


def cost_of(seconds, *figures, **others):
    """Seconds per microbatch, and the other figures of a `StageCost` in order or by name."""
    names = [field.name for field in dataclasses.fields(StageCost)]
    return StageCost(**dict(zip(names, (seconds, *figures), strict=False)), **others)


def table_of(rng, layers, options, *, whole=False):
    """Random costs; whole numbers make ties."""

    def draw(low, high):
        shape = (options, layers, layers + 1)
        return rng.integers(low, high, shape).astype(float) if whole else rng.uniform(low, high, shape)

    seconds = draw(1, 6)
    seconds[rng.random(seconds.shape) < 0.1] = np.inf
    return table_of_arrays(seconds, draw(0, 5), draw(0, 2), draw(0, 4), draw(0, 3), draw(0, 2), draw(0, 9))


def chosen_of(choice):
    return [(stage.first_layer, stage.end_layer, stage.option) for stage in choice.stages]


def assert_best(problem, manual=None, *, same_choice=True):
    expected = brute_force(problem, manual)
    if expected is None:
        with pytest.raises((OutOfMemoryError, ArgumentError)):
            choose_stages(problem, manual=manual)
        return
    choice = choose_stages(problem, manual=manual)
    stages = chosen_of(choice)
    assert fits(problem, stages)
    assert choice.step_s == pytest.approx(step_s(problem, stages), rel=1e-12)
    assert choice.step_s == pytest.approx(expected[0], rel=1e-12), (stages, expected[1])
    if same_choice:
        assert stages == expected[1]
    assert_faster(problem, manual, expected[0])


def test_what_is_hoped_to_be_divided_is_missing_from_all_that_a_stage_needs():
    costs = CostTable.of(1, 2, lambda i, j, z: cost_of(1.0, weight_bytes=8.0, least_bytes=10.0))
    hoped = costs.with_divided_state((1, 4), (False, True))
    assert [float(hoped.weight_bytes[z, 0, 1]) for z in range(2)] == [8, 2]
    assert [float(hoped.least_bytes[z, 0, 1]) for z in range(2)] == [10, 4]


def test_what_nothing_goes_below_is_not_what_stages_that_fill_no_machine_take():
    """The reduction of gradients takes so long that no stage time can matter; the least of them bounds all the same."""
    costs = CostTable.of(1, 2, lambda i, j, z: cost_of((5.0, 1.0)[z], once_s=10.0))
    problem = problem_of(costs, ((1, 1), (1, 2)), (1, 2), 6)
    assert choose_stages(problem).step_s == 16
    assert 14.4 <= choose_faster_stages(problem, 14.4).at_least_s <= 16


def assert_faster(problem, manual, best_s):
    """A time that the best choice beats does not hide it; below its time there is none; and without time any choice may do."""
    faster = choose_faster_stages(problem, 1.1 * best_s, manual=manual)
    assert faster.step_s == pytest.approx(best_s, rel=1e-12)
    slower = choose_faster_stages(problem, 0.9 * best_s, manual=manual)
    assert not isinstance(slower, StageChoice)
    assert 0.9 * best_s <= slower.at_least_s <= best_s * (1 + 1e-9)
    hurried = choose_faster_stages(problem, math.inf, manual=manual, budget=Budget(seconds=0))
    assert fits(problem, chosen_of(hurried))
    assert hurried.bound_s <= best_s <= hurried.step_s * (1 + 1e-9)


CLUSTERS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (1, 8), (2, 4), (4, 2), (1, 6), (3, 2), (1, 3))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_choice_is_the_best_of_all_for_every_small_cluster_and_number_of_layers(cluster, schedule, chunks):
    """Half of the costs are whole numbers, which make ties, by turns in each of the loops."""
    options = submeshes(*cluster)
    for layers in range(1, 6 if len(options) < 5 else 5):
        for (b, batches), (m, memory) in itertools.product(enumerate((1, 2, 4)), enumerate((math.inf, 12.0, 6.0))):
            whole = (layers + b + m + len(options)) % 2 == 1
            rng = np.random.default_rng([layers, batches, int(whole), *cluster])
            costs = table_of(rng, layers, len(options), whole=whole)
            assert_best(problem_of(costs, options, cluster, batches, schedule, chunks, memory))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_what_a_family_takes_at_least_is_a_bound_and_no_family_that_fits_is_left(schedule, chunks):
    """Families that take longer than the best are left unlooked at."""
    options, bounds = submeshes(2, 4), 0
    for seed, memory in itertools.product(range(12), (math.inf, 9.0)):
        costs = table_of(np.random.default_rng(seed), 4, len(options))
        problem = problem_of(costs, options, (2, 4), 4, schedule, chunks, memory)
        for family in families_of(problem, Manual()):
            meshes = sorted({count // family.chunks for count in family.counts})
            best = [found[0] for one in meshes if (found := brute_force(problem, Manual(num_stages=one))) is not None]
            assert family.least_step_s <= min(best, default=math.inf) * (1 + 1e-12)
            bounds += math.isfinite(family.least_step_s)
    assert bounds


@pytest.mark.parametrize("cluster", [(2, 4), (4, 2), (3, 2), (2, 2)])
def test_the_choice_is_the_best_of_all_where_parts_of_a_node_are_slow(cluster):
    options = submeshes(*cluster)
    size = np.array([nodes * part for nodes, part in options])
    for seed, batches in itertools.product(range(4), (2, 8)):
        costs = table_of(np.random.default_rng([seed, *cluster]), 4, len(options), whole=seed % 2 == 1)
        seconds = costs.seconds * np.where(size >= cluster[1], 1.0, 20.0 / size)[:, None, None]
        assert_best(problem_of(dataclasses.replace(costs, seconds=seconds), options, cluster, batches))


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data())
def test_the_choice_is_the_best_of_all_whatever_the_costs(data):
    cluster = data.draw(st.sampled_from(CLUSTERS))
    options = submeshes(*cluster)
    schedule, chunks = data.draw(st.sampled_from(SCHEDULES))
    layers = data.draw(st.integers(1, 5 if len(options) < 5 else 4))
    figure = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 0.1, 0.7])
    shape = (len(options), layers, layers + 1)

    def draw(allowed):
        size = math.prod(shape)
        return np.array(data.draw(st.lists(allowed, min_size=size, max_size=size))).reshape(shape)

    seconds = draw(st.sampled_from([1.0, 2.0, 3.0, 5.0, 0.3, 0.7, math.inf]))
    costs = table_of_arrays(seconds, *(draw(figure) for _ in range(6)))
    memory = data.draw(st.sampled_from([math.inf, 30.0, 12.0, 6.0, 2.0]))
    batches = data.draw(st.sampled_from([1, 2, 3, 4, 6, 16]))
    assert_best(problem_of(costs, options, cluster, batches, schedule, chunks, memory))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_what_the_user_decides_is_kept_and_the_rest_is_the_best(schedule, chunks):
    cluster, layers = (2, 2), 4
    options = submeshes(*cluster)
    decisions = [Manual(num_stages=s) for s in (1, 2, 3, 4)]
    decisions += [Manual(cuts=cuts) for n in range(4) for cuts in itertools.combinations(range(1, layers), n)]
    decisions += [Manual(submeshes=s) for s in (((1, 2), (1, 2)), ((1, 1), (1, 2), (1, 1)), ((2, 2),), ((1, 1),) * 4)]
    decisions += [Manual(cuts=(1,), submeshes=((1, 2), (1, 2))), Manual(num_stages=3, cuts=(1, 3))]
    for seed, manual in enumerate(decisions):
        for memory in (math.inf, 12.0):
            costs = table_of(np.random.default_rng(seed), layers, len(options))
            assert_best(problem_of(costs, options, cluster, 4, schedule, chunks, memory), manual)


def test_an_option_may_occur_twice_as_with_and_without_recomputation():
    options = ((1, 2), (1, 2))

    costs = CostTable.of(1, 2, lambda i, j, z: cost_of(1.0 + z, activation_bytes=8.0 / (1 + z)))
    assert chosen_of(choose_stages(problem_of(costs, options, (1, 2), 4))) == [(0, 1, 0)]
    assert chosen_of(choose_stages(problem_of(costs, options, (1, 2), 4, memory_bytes=5.0))) == [(0, 1, 1)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_choice_is_the_best_of_all_where_options_are_of_one_size(schedule):
    options = submeshes(1, 2) * 2
    for seed, memory in itertools.product(range(10), (math.inf, 12.0, 6.0)):
        costs = table_of(np.random.default_rng(seed), 4, len(options), whole=seed % 2 == 1)
        assert_best(problem_of(costs, options, (1, 2), 4, schedule, memory_bytes=memory))


def equal_layers(layers, options, *, once_s=0.0):
    """One second per layer and device."""
    return CostTable.of(
        layers,
        len(options),
        lambda i, j, z: cost_of((j - i) / math.prod(options[z]), once_s, weight_bytes=j - i, activation_bytes=1.0),
    )


@pytest.mark.parametrize(("schedule", "chunks"), [s for s in SCHEDULES if s[0] != "inference"])
def test_the_seconds_are_those_of_the_schedule_run_with_equal_stages(schedule, chunks):
    durations = {"forward": 1 / 3, "backward": 2 / 3, "input_gradient": 1 / 3, "weight_gradient": 1 / 3}
    for meshes in (2, 4):
        for batches in (1, 2, 3, 4, 8):
            if schedule == "interleaved" and batches % meshes:
                continue
            layers = meshes * chunks
            problem = problem_of(equal_layers(layers, [(1, 1)]), ((1, 1),), (1, meshes), batches, schedule, chunks)
            choice = choose_stages(problem, manual=Manual(num_stages=meshes))
            made = make_schedule(schedule, num_meshes=meshes, num_microbatches=batches, virtual_stages=chunks)
            times = task_times(made, lambda task: durations[task.kind])
            assert choice.step_s == pytest.approx(max(end for _, end in times.values())), (meshes, batches)
            counted = in_flight(schedule, chunks, meshes=meshes, batches=batches)
        assert tuple(stage.in_flight for stage in choice.stages) == counted


def test_among_equals_fewer_stages_win_and_then_earlier_cuts():
    options = submeshes(1, 4)
    free = CostTable.of(3, len(options), lambda i, j, z: cost_of(0.0))
    assert chosen_of(choose_stages(problem_of(free, options, (1, 4), 4))) == [(0, 3, 2)]
    two = choose_stages(problem_of(free, options, (1, 4), 4), manual=Manual(num_stages=2))
    assert chosen_of(two) == [(0, 1, 1), (1, 3, 1)]


def test_a_tolerance_never_costs_more_than_it_says_and_the_bound_holds():
    for seed in range(30):
        options = submeshes(2, 4)
        problem = problem_of(table_of(np.random.default_rng(seed), 8, len(options)), options, (2, 4), 6)
        exact, rough = choose_stages(problem), choose_stages(problem, tolerance=0.2)
        assert exact.bound_s == exact.step_s
        assert rough.bound_s <= exact.step_s <= rough.step_s <= exact.step_s / 0.8


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_below_a_number_of_seconds_the_choice_is_the_best_one_or_a_bound_that_holds(schedule):
    """What is slower is left early, by submeshes and by devices: that neither loses a choice nor says too much of the others."""
    virtual_stages, bounds = 2 if schedule == "interleaved" else 1, 0
    for seed in range(12):
        rng, options = np.random.default_rng(seed), submeshes(2, 4)
        problem = problem_of(
            table_of(rng, 7, len(options)), options, (2, 4), 8, schedule, virtual_stages, float(rng.uniform(20, 60))
        )
        try:
            best = choose_stages(problem)
        except (OutOfMemoryError, ArgumentError):
            continue
        for part in (0.3, 0.9, 0.999, 1.001, 1.1, 2.0):
            found = choose_faster_stages(problem, part * best.step_s)
            if part > 1:
                assert (found.step_s, found.stages) == (best.step_s, best.stages)
            else:
                bounds += 1
                assert part * best.step_s <= found.at_least_s <= best.step_s
    assert bounds


def test_more_stages_than_microbatches_in_a_split_schedule_are_ruled_out_number_by_number(monkeypatch):
    """Each further stage makes the bubble of zb-h1 longer; a bound that forgets it looked at ten times as many limits."""
    rng, solved = np.random.default_rng(0), []

    def count_exact(*args):
        solved.append(args)
        return exact(*args)

    monkeypatch.setattr("autopar.inter_op.dynamic_program.family_search.exact", count_exact)
    options = submeshes(2, 8)
    each = rng.uniform(0.5, 1.5, 16)
    seconds = np.full((len(options), 16, 17), np.inf)
    for z, (nodes, per_node) in enumerate(options):
        for i, j in itertools.combinations(range(17), 2):
            latency = 0.8 * (nodes * per_node > 1) + 2.0 * (nodes > 1)
            seconds[z, i, j] = (each[i:j] * (1 / (nodes * per_node) + latency)).sum()
    free = np.zeros_like(seconds)
    once_s = rng.uniform(0.0, 0.3, seconds.shape)
    table = table_of_arrays(seconds, once_s, free + 0.1, free, free, free, free)
    problem = problem_of(table, options, (2, 8), 2, "zb-h1")
    choice = choose_stages(problem)
    assert len(choice.stages) > problem.microbatches
    assert len(solved) < 250


def test_64_layers_on_64_devices_take_seconds():
    options, layers = submeshes(8, 8), 64
    rng = np.random.default_rng(0)
    sizes = np.array([n * m for n, m in options])[:, None, None]
    ends = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, layers))])
    work = (
        (ends[None, None, :] - ends[None, :-1, None]) / sizes * rng.uniform(1, 1.2, (len(options), layers, layers + 1))
    )
    free = np.zeros_like(work)
    costs = table_of_arrays(work, work * 0.3, np.full_like(work, 0.01), work, work * 0.3, free, free)
    for schedule in ("1f1b", "zb-h1"):
        start = time.perf_counter()
        choice = choose_stages(problem_of(costs, options, (8, 8), 64, schedule, memory_bytes=3.0))
        assert time.perf_counter() - start < 30
        assert max(stage.peak_bytes for stage in choice.stages) <= 3.0


def test_the_choice_says_what_each_stage_needs_and_which_is_slowest():
    options = submeshes(1, 4)
    costs = CostTable.of(
        2,
        len(options),
        lambda i, j, z: cost_of(5.0 if i else 2.0, 0.5, 0.25, 100.0, 7.0) if j - i == 1 and z == 1 else None,
    )
    choice = choose_stages(problem_of(costs, options, (1, 4), 8, memory_bytes=114.0))
    first, second = choice.stages
    assert (first.stage_s, second.stage_s, choice.bottleneck) == (2.0, 5.0, 1)
    assert (first.in_flight, first.peak_bytes, second.in_flight, second.peak_bytes) == (2, 114.0, 1, 107.0)
    assert choice.step_s == 2.25 + 8 * 5.0 + 0.5
    assert choice.devices == ((0, 1), (2, 3))


def test_chunks_of_a_mesh_need_what_all_have_in_flight_together_and_what_the_one_that_runs_works_with():
    """Four equal chunks on two meshes, the first of which has five microbatches in flight: 2 x 1 + 5 x 1 + 2 bytes."""
    costs = CostTable.of(4, 1, lambda i, j, z: cost_of(1.0, weight_bytes=1.0, activation_bytes=1.0, working_bytes=2.0))

    def choose(memory_bytes):
        problem = problem_of(costs, ((1, 1),), (1, 2), 4, "interleaved", 2, memory_bytes)
        return choose_stages(problem, manual=Manual(num_stages=2)).stages

    assert [(stage.in_flight, 2 * stage.peak_bytes) for stage in choose(9.0)] == [(2.5, 9.0), (1.5, 7.0)] * 2
    with pytest.raises(OutOfMemoryError, match=r"state and gradients, 1 while a task runs, and 2\.5 x 1"):
        choose(8.9)


def test_if_nothing_fits_the_tightest_stage_is_named_with_its_bytes():
    options = ((1, 1),)
    costs = CostTable.of(2, 1, lambda i, j, z: cost_of(1.0, weight_bytes=4000.0, activation_bytes=1000.0 - 300 * i))
    with pytest.raises(OutOfMemoryError) as error:
        choose_stages(problem_of(costs, options, (1, 2), 4, "gpipe", memory_bytes=5000.0))
    assert "fits into 5,000 bytes per device" in str(error.value)
    assert "stage 0, layers 0 to 0 on a submesh of 1 x 1 devices, needs 8,000 bytes" in str(error.value)
    assert "4,000 of parameters, optimizer state and gradients, and 4 x 1,000 of activations" in str(error.value)
    assert "schedule='1f1b' (now 'gpipe')" in str(error.value)


def test_wrong_questions_are_refused_with_all_that_is_wrong():
    options = ((1, 3), (1, 4))
    costs = CostTable.of(2, 2, lambda i, j, z: cost_of(1.0))
    with pytest.raises(ArgumentError) as error:
        choose_stages(
            problem_of(costs, options, (1, 4), 0, "interleaved"), manual=Manual(cuts=(2,), submeshes=((1, 3),))
        )
    text = str(error.value)
    assert "'interleaved' with virtual_stages=1: 'interleaved' needs two or more" in text
    assert "num_microbatches=0: must be at least 1" in text
    assert "submeshes ((1, 3),) do not fill (1, 4)" in text
    assert "cuts (2,) are not ascending numbers of layers between 1 and 1" in text
    with pytest.raises(ArgumentError, match=r"submeshes \[\(1, 3\)\] are not among"):
        choose_stages(problem_of(costs, options, (1, 4), 1))


def test_decisions_that_leave_nothing_are_told_apart_from_too_little_memory():
    costs = equal_layers(2, [(1, 2)])
    with pytest.raises(ArgumentError, match=r"decided by hand: num_stages=2"):
        choose_stages(problem_of(costs, ((1, 2),), (1, 2), 4), manual=Manual(num_stages=2))


def test_stages_that_do_not_fit_while_they_are_fast_are_found_where_they_may_be_slower():
    """Three microbatches in flight are too many for the fast last layer; two, those of two stages, would not be."""
    figures = {(i, i + 1, 0): cost_of(1.0) for i in range(3)}
    figures |= {(2, 3, 1): cost_of(1.0, activation_bytes=1.0), (0, 1, 1): cost_of(5.0)}
    costs = CostTable.of(3, 2, lambda i, j, z: figures.get((i, j, z)))
    problem = problem_of(costs, ((1, 1), (1, 2)), (1, 4), 4, "zb-h1", memory_bytes=2.5)
    assert chosen_of(choose_stages(problem)) == [(0, 1, 1), (1, 2, 0), (2, 3, 0)]
