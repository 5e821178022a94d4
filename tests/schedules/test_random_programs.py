"""Random programs: any tasks that read what their order allows.

Results must be those of a plain loop, arrays must die in time, and no array may be used after it was consumed.
"""

import dataclasses
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.driver import Driver
from autopar.schedules.emit import emit
from autopar.schedules.instructions import Value
from tests.schedules.chains import small_schedules
from tests.schedules.task_specs import spec


class Cell:
    """An array that knows whether it was consumed."""

    def __init__(self, content):
        self.content = content
        self.consumed = False


@dataclasses.dataclass
class RandomStep:
    schedule: object
    specs: list
    inputs: dict
    outputs: list
    consumable: list


ORDER = {"forward": 0, "backward": 1, "input_gradient": 1, "weight_gradient": 2}


def before(reader, writer):
    """Every schedule runs the writer's task before the reader's, for one microbatch."""
    if ORDER[writer.kind] != ORDER[reader.kind]:
        if reader.kind == "weight_gradient" and writer.kind != "forward":
            return writer.stage >= reader.stage
        return ORDER[writer.kind] < ORDER[reader.kind]
    if reader.kind == "weight_gradient":
        return False
    return writer.stage < reader.stage if reader.kind == "forward" else writer.stage > reader.stage


@st.composite
def random_steps(draw):
    schedules = list(small_schedules(max_meshes=3, max_microbatches=4, max_virtual=2))
    schedule = draw(st.sampled_from(schedules))
    p, m, last = schedule.num_meshes, schedule.num_microbatches, schedule.num_stages - 1
    inputs = {mesh: [Value(f"p{mesh}"), *(Value(f"b{mesh}", k) for k in range(m))] for mesh in range(p)}
    everywhere = draw(st.booleans())
    if everywhere:
        for mesh in range(p):
            inputs[mesh].append(Value("step"))
    parameters = [f"p{mesh}" for mesh in range(p)] + ["step"] * everywhere
    batches = [f"b{mesh}*" for mesh in range(p)]
    specs = []
    prologue_made = []
    for n in range(draw(st.integers(0, 2))):
        reads = draw(st.lists(st.sampled_from(parameters + batches + prologue_made), max_size=3, unique=True))
        specs.append(spec(f"pro{n}", draw(st.integers(0, p - 1)), "prologue", " ".join(reads), f"u{n} v{n}*"))
        prologue_made += [f"u{n}", f"v{n}*"]
    tasks, made, accumulators = [], {}, []
    for kind in schedule.kinds:
        for stage in range(last + 1):
            task = spec(f"{kind}{stage}", stage % p, kind, stage=stage)
            earlier = [name for other in tasks if before(task, other) for name in made[other.name]]
            reads = draw(
                st.lists(st.sampled_from(parameters + batches + prologue_made + earlier), max_size=4, unique=True)
            )
            writes = [f"{kind[0]}{stage}_{n}*" for n in range(draw(st.integers(0, 2)))]
            made[task.name] = writes
            donated = ()
            if draw(st.booleans()):
                accumulators.append((task.mesh, f"acc_{kind}{stage}"))
                reads, writes, donated = [accumulators[-1][1], *reads], [accumulators[-1][1], *writes], (0,)
            tasks.append(spec(task.name, task.mesh, kind, " ".join(reads), " ".join(writes), donated, stage))
    specs += tasks
    for mesh, name in accumulators:
        inputs[mesh].append(Value(name))
    everything = parameters + batches + prologue_made + [n for names in made.values() for n in names]
    everything += [name for _, name in accumulators]
    for n in range(draw(st.integers(0, 3))):
        mesh = draw(st.integers(0, p - 1))
        reads = draw(st.lists(st.sampled_from(everything), max_size=4, unique=True))
        again = [name for name in reads if not name.endswith("*") and draw(st.booleans())]
        specs.append(spec(f"epi{n}", mesh, "epilogue", " ".join(reads), " ".join([f"e{n}", *again])))
        everything.append(f"e{n}")
    supplied = [(mesh, value) for mesh in inputs for value in inputs[mesh]]
    consumable = {pair for pair in supplied if pair[1].name.startswith("acc")}
    consumable |= set(draw(st.lists(st.sampled_from(supplied), unique=True)))
    outputs = []
    for name in draw(st.lists(st.sampled_from(everything), max_size=4, unique=True)):
        microbatch = draw(st.integers(0, m - 1)) if name.endswith("*") else None
        outputs.append((draw(st.integers(0, p - 1)), Value(name.rstrip("*"), microbatch)))
    return RandomStep(schedule, specs, inputs, outputs, sorted(consumable, key=str))


def slot_values(slots, microbatch, m):
    for slot in slots:
        if not slot.per_microbatch:
            yield Value(slot.name)
        elif microbatch is None:
            yield from (Value(slot.name, k) for k in range(m))
        else:
            yield Value(slot.name, microbatch)


def compute(name, position, arguments):
    return hash((name, position, *arguments))


def by_a_plain_loop(step):
    """One name space; microbatch after microbatch, each through all stages."""
    m = step.schedule.num_microbatches
    store = {value: hash(str(value)) for values in step.inputs.values() for value in values}

    def perform(spec, microbatch):
        arguments = [store[value] for value in slot_values(spec.inputs, microbatch, m)]
        for n, value in enumerate(slot_values(spec.outputs, microbatch, m)):
            store[value] = compute(spec.name, n, arguments)

    def in_order(spec):
        return (ORDER[spec.kind], spec.stage if spec.kind == "forward" else -spec.stage)

    for task in (s for s in step.specs if s.kind == "prologue"):
        perform(task, None)
    scheduled = sorted((s for s in step.specs if s.kind in ORDER), key=in_order)
    for k in range(m):
        for task in scheduled:
            perform(task, k)
    for task in (s for s in step.specs if s.kind == "epilogue"):
        perform(task, None)
    return {(mesh, value): store[value] for mesh, value in step.outputs}


@given(random_steps())
@settings(max_examples=200)
def test_any_program_gives_what_a_plain_loop_gives_and_keeps_nothing(step):
    program = emit(
        step.schedule, step.specs, inputs=step.inputs, outputs=tuple(step.outputs), consumable=step.consumable
    )
    cells_alive = weakref.WeakSet()
    donated = {s.name: {n for n, _ in enumerate(s.inputs) if n in s.donated} for s in step.specs}

    def new(content):
        cell = Cell(content)
        cells_alive.add(cell)
        return cell

    def call(spec):
        def run(cells):
            assert not any(cell.consumed for cell in cells), f"{spec.name} reads a consumed array"
            contents = [cell.content for cell in cells]
            for n in donated[spec.name]:
                cells[n].consumed = True
            writes = sum(step.schedule.num_microbatches if many(spec, s) else 1 for s in spec.outputs)
            return [new(compute(spec.name, n, contents)) for n in range(writes)]

        return run

    def many(spec, slot):
        return slot.per_microbatch and spec.kind in ("prologue", "epilogue")

    def transfer(cell, value, source, target):
        assert not cell.consumed
        return new(cell.content)

    driver = Driver(program, {s.name: call(s) for s in step.specs}, transfer)
    supplied = {(mesh, v): new(hash(str(v))) for mesh, vs in step.inputs.items() for v in vs}
    results = driver.run(supplied)
    assert {key: cell.content for key, cell in results.items()} == by_a_plain_loop(step)
    assert not any(cell.consumed for cell in results.values())
    survivors = [cell for key, cell in supplied.items() if key not in set(step.consumable)]
    assert not any(cell.consumed for cell in survivors)
    assert set(cells_alive) == {*supplied.values(), *results.values()}
