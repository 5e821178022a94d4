"""Chains on numbers that can be watched: which are alive, what runs next, and which failed behind the caller's back."""

import collections
import threading
import time
import weakref

from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.instructions import Run, Send
from tests.schedules.chains import callables_of, inputs_of, number

SMALL = [("1f1b", 3, 3), ("eager-1f1b", 2, 3), ("zb-h1", 2, 2), ("gpipe", 1, 2), ("inference", 3, 2)]
LONG_S = 60.0
"""Seconds after which a test that waits has failed."""


class Number:
    """A float that can be watched by weak references."""

    def __init__(self, content):
        self.content = content

    def __add__(self, other):
        return Number(self.content + other.content)

    def __mul__(self, other):
        return Number(self.content * other.content)


class Watched:
    """A chain on `Number`s; `before` is called in front of every task and transfer with the instruction, `copied` with copies."""

    def __init__(self, schedule, before, copied=lambda copy: None):
        self.work = make_chain(schedule)
        self.program = self.work.emit()
        self.alive = weakref.WeakSet()
        self.before, self.copied = before, copied
        self.next_run = {}
        self.sends = {(i.value, i.mesh, i.target_mesh): i for i in self.program.instructions if isinstance(i, Send)}
        calls = {name: self._call(name, function) for name, function in callables_of(self.work.specs).items()}
        self.driver = Driver(self.program, calls, self._transfer, lines=lambda task: f"lines of {task}")

    def inputs(self):
        """What a new run needs; every task starts with its first microbatch."""
        runs = [i for i in self.program.instructions if isinstance(i, Run)]
        self.next_run = {run.task: iter([i for i in runs if i.task == run.task]) for run in runs}
        numbers = {key: Number(content) for key, content in inputs_of(self.work).items()}
        self.alive.update(numbers.values())
        return numbers

    def _call(self, name, function):
        def run(arrays):
            self.before(next(self.next_run[name]))
            results = function(arrays)
            self.alive.update(results)
            return results

        return run

    def _transfer(self, array, value, source, target):
        self.before(self.sends[value, source, target])
        copy = Number(array.content)
        self.alive.add(copy)
        self.copied(copy)
        return copy


def nothing(instruction):
    pass


class Poisoned(Number):
    """A number of a program that may have failed behind the caller's back; what is made of it holds the same error."""

    def __init__(self, content, error=None, waited=()):
        super().__init__(content)
        self.error, self.waited = error, waited

    def __add__(self, other):
        return Poisoned(self.content + other.content, self.error or other.error, self.waited)

    def __mul__(self, other):
        return Poisoned(self.content * other.content, self.error or other.error, self.waited)

    def block_until_ready(self):
        self.waited.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return self


def with_witnesses(work, culprit, waited):
    """Calls that return a witness; the culprit, a task's name and how often it was called before, fails."""
    counts = collections.Counter()

    def call(name, function):
        def run(arrays):
            results = function(arrays)
            if (name, counts[name]) == culprit:
                results = [Poisoned(x.content, ValueError(f"{name} broke\nand more"), waited) for x in results]
            counts[name] += 1
            return [*results, results[0] * results[0]]

        return run

    calls = {name: call(name, function) for name, function in callables_of(work.specs).items()}
    inputs = inputs_of(work, lambda mesh, value: Poisoned(number(value), None, waited))
    return calls, inputs


def performed(program):
    """The instructions that call something of the user's: tasks and transfers."""
    return [n for n, i in enumerate(program.instructions) if isinstance(i, Run | Send)]


def wait_for(condition):
    """Whether the condition is met within ten seconds."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()
