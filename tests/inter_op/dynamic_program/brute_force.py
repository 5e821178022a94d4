"""Every choice of stages of a small problem, with its seconds and bytes by formula: the oracle of the dynamic program."""

import itertools
import math

from autopar.inter_op.dynamic_program.problem import Manual
from autopar.schedules.in_flight import microbatches_in_flight
from autopar.schedules.schedules import make_schedule


def in_flight(schedule, chunks, *, meshes, batches):
    """Microbatches in flight of each stage, counted in the schedule itself; of several on a mesh, its part of all together."""
    if meshes == 1:
        return (1,)
    made = make_schedule(schedule, num_meshes=meshes, num_microbatches=batches, virtual_stages=chunks)
    if chunks == 1:
        return microbatches_in_flight(made)
    change = {"forward": 1, "backward": -1}
    return tuple(max(itertools.accumulate(change[task.kind] for task in row)) / chunks for row in made.rows) * chunks


def step_s(problem, stages):
    """Seconds of a choice [(first layer, end layer, option), ...], by the formulas of the papers."""
    costs, layers, batches = problem.costs, problem.layers, problem.microbatches
    times = [costs.seconds[z, i, j] for i, j, z in stages]
    sent_s = sum(costs.transfer_s[z, i, j] for i, j, z in stages if j < layers)
    once_s = max(costs.once_s[z, i, j] for i, j, z in stages)
    count = len(stages)
    if count > 1 and problem.schedule == "interleaved":
        chunks = problem.virtual_stages
        return (chunks * batches - 1) * max(times) + sum(times) / chunks + sent_s + chunks * once_s
    period_s = max(periods_s(problem, stages))
    if count > 1 and problem.schedule == "zb-h1":
        return sum(times) / 3 + (batches - 1 / 3 + max(0, count - batches) / 3) * period_s + sent_s + once_s
    return sum(times) + (batches - 1) * period_s + sent_s + once_s


def periods_s(problem, stages):
    """Seconds from one microbatch to the next of each stage, as if those behind it were like it."""
    costs, batches, schedule = problem.costs, problem.microbatches, problem.schedule
    kept = in_flight(schedule, 1, meshes=len(stages), batches=batches) if len(stages) > 1 else (1,)
    for place, ((i, j, z), f) in zip(range(len(stages), 0, -1), zip(stages, kept, strict=True), strict=True):
        seconds, sent_s = costs.seconds[z, i, j], costs.transfer_s[z, i, j] if j < problem.layers else 0.0
        if schedule == "inference":
            yield seconds
            continue
        f, work = (place, (2 * place + 1) / 3) if schedule == "zb-h1" else (f, place)
        yield max(seconds, (work * seconds + (place - 1) * sent_s) / f) if f < batches else seconds


def fits(problem, stages):
    chunks = problem.virtual_stages if len(stages) > 1 else 1
    kept = in_flight(problem.schedule, chunks, meshes=len(stages) // chunks, batches=problem.microbatches)
    costs = problem.costs
    return all(
        max(
            (costs.weight_bytes[z, i, j] + f * costs.activation_bytes[z, i, j] + costs.working_bytes[z, i, j] / chunks)
            * chunks,
            costs.least_bytes[z, i, j],
        )
        <= problem.memory_bytes
        for (i, j, z), f in zip(stages, kept, strict=True)
    )


def all_choices(problem):
    """Every way to cut the layers and to give submeshes to the stages that uses all devices, memory aside."""
    nodes, part = problem.cluster
    options, layers, chunks = range(len(problem.options)), problem.layers, problem.virtual_stages
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            spans = list(itertools.pairwise((0, *cuts, layers)))
            for chosen in itertools.product(options, repeat=count):
                shapes = [problem.options[z] for z in chosen]
                if chunks > 1 and count > 1:
                    meshes, rest = divmod(count, chunks)
                    if rest or meshes < 2 or len(set(shapes)) > 1 or problem.microbatches % meshes:
                        continue
                    shapes = shapes[:meshes]
                if sum(n * m for n, m in shapes) != nodes * part:
                    continue
                stages = [(i, j, z) for (i, j), z in zip(spans, chosen, strict=True)]
                if all(math.isfinite(problem.costs.seconds[z, i, j]) for i, j, z in stages):
                    yield stages


def rank(stages):
    return len(stages), [i for i, _, _ in stages], [z for _, _, z in stages]


def brute_force(problem, manual=None):
    """(seconds, stages) of the best of all choices that fit, first in rank among equals; None if none fits."""
    manual = manual or Manual()
    found = []
    for stages in all_choices(problem):
        chunks = problem.virtual_stages if len(stages) > 1 else 1
        submeshes_ = tuple(problem.options[z] for _, _, z in stages[: len(stages) // chunks])
        if manual.num_stages not in (None, len(stages) // chunks):
            continue
        if manual.cuts not in (None, tuple(i for i, _, _ in stages[1:])):
            continue
        if manual.submeshes not in (None, submeshes_):
            continue
        if fits(problem, stages):
            found.append((step_s(problem, stages), stages))
    if not found:
        return None
    least = min(s for s, _ in found)
    return min(((s, stages) for s, stages in found if s <= least * (1 + 1e-12)), key=lambda c: rank(c[1]))
