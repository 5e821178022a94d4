"""Drivers of several processes that meet in what they share: the same results, and no two ever wait for each other."""

import collections
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from autopar.errors import PipelineError
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.launch_order import order_launches, part_of
from autopar.schedules.schedules import make_schedule
from tests.schedules.chains import callables_of, expected, inputs_of, small_schedules

PATIENCE_S = 20


class World:
    """Processes as threads; what is shared blocks until all that take part have come."""

    def __init__(self, schedule, processes):
        self.work, self.processes = make_chain(schedule), processes
        self.program = order_launches(self.work.emit(), processes)
        self.everyone = sorted(set().union(*processes))
        self.come, self.given, self.changed = collections.defaultdict(set), {}, threading.Condition()
        self.log = {process: [] for process in self.everyone}
        self.count = collections.Counter()

    def meet(self, process, those, what, array):
        """Wait for the others; returns what one of them has brought."""
        with self.changed:
            self.count[process, what] += 1
            what = (*what, self.count[process, what])
            self.log[process].append(what)
            self.come[what].add(process)
            if array is not None:
                self.given[what] = array
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.come[what] == those, PATIENCE_S), f"{process} waits in {what}"
            return self.given.get(what)

    def driver(self, process, **options):
        """One process's driver."""
        mesh_of = {spec.name: spec.mesh for spec in self.work.specs}

        def transfer(array, value, source, target):
            those = self.processes[source] | self.processes[target]
            return array if those == {process} else self.meet(process, those, (value, source, target), array)

        def together(name, function):
            those = self.processes[mesh_of[name]]

            def call(arrays):
                if those != {process}:
                    self.meet(process, those, (name,), None)
                return function(arrays)

            return call

        calls = {name: together(name, function) for name, function in callables_of(self.work.specs).items()}
        return Driver(self.program, calls, transfer, part=part_of(self.program, self.processes, process), **options)

    def inputs(self, process):
        """Those of the process's meshes."""
        return {key: x for key, x in inputs_of(self.work).items() if process in self.processes[key[0]]}


def homes(num_meshes, *sets):
    return [frozenset(those) for those, _ in zip(itertools.cycle(sets), range(num_meshes), strict=False)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "sets", [({0}, {1}), ({0}, {0}, {1}, {1}), ({0, 1},), ({0, 1}, {1, 2}), ({0}, {0, 1})], ids=str
)
def test_every_process_has_the_results_of_its_meshes(sets):
    schedules = [s for s in small_schedules(max_meshes=4, max_microbatches=4, max_virtual=2) if s.num_microbatches > 2]
    for schedule in schedules:
        processes = homes(schedule.num_meshes, *sets)
        world = World(schedule, processes)
        with ThreadPoolExecutor(len(world.everyone)) as pool:
            runs = [pool.submit(world.driver(p, watch=lambda: None).run, world.inputs(p)) for p in world.everyone]
            found = [run.result() for run in runs]
        wanted = {key: expected(schedule)[str(key[1])] for key in world.program.outputs}
        for process, outputs in zip(world.everyone, found, strict=True):
            assert outputs == pytest.approx({key: x for key, x in wanted.items() if process in processes[key[0]]})
        for a, b in itertools.combinations(world.everyone, 2):
            common = set(world.log[a]) & set(world.log[b])
            assert [x for x in world.log[a] if x in common] == [x for x in world.log[b] if x in common]


def test_a_driver_that_waits_for_a_lost_process_ends_when_it_hears_of_it():
    """Nobody plays process 1."""
    world = World(make_schedule("gpipe", num_meshes=2, num_microbatches=2), homes(2, {0}, {1}))
    heard = threading.Event()

    def watch():
        heard.set()
        with world.changed:  # lets the thread go that waits in the transfer
            for those in world.come.values():
                those |= {0, 1}
            world.changed.notify_all()
        raise PipelineError("process 1 failed")

    before = threading.active_count()
    with pytest.raises(PipelineError, match="process 1 failed"):
        world.driver(0, watch=watch).run(world.inputs(0))
    assert heard.is_set()
    assert threading.active_count() == before
