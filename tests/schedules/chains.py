"""The plain chain of `autopar.schedules.chain` on numbers: y = x * w, with its gradients, and what a plain loop makes of it.

Also all small schedules, for tests that exhaust them.
"""

import contextlib
import itertools
import os
import signal
import time

from autopar.errors import ScheduleError
from autopar.runtime.driver import Driver
from autopar.schedules.chain import make_chain
from autopar.schedules.schedules import NAMED_SCHEDULES, SCHEDULES, TRAINING, make_schedule

TRAINING_IN_CHUNKS = [(name, NAMED_SCHEDULES[name].fewest_chunks) for name in TRAINING]
"""Every schedule with a backward, and the least number of chunks that a mesh may have in it."""
TRAINING_IN_ONE = [name for name, chunks in TRAINING_IN_CHUNKS if chunks == 1]
"""Those in which a mesh may have one chunk."""


def small_schedules(max_meshes=4, max_microbatches=9, max_virtual=3):
    """Every schedule that exists within these sizes."""
    sizes = (range(1, max_meshes + 1), range(1, max_microbatches + 1), range(1, max_virtual + 1))
    for name, (p, m, v) in itertools.product(SCHEDULES, itertools.product(*sizes)):
        try:
            yield make_schedule(name, num_meshes=p, num_microbatches=m, virtual_stages=v)
        except ScheduleError:
            continue


def callables_of(specs):
    """A function per task, by its kind."""
    functions = {
        "forward": lambda w, x: (x * w, x),
        "backward": lambda dw, r, g, w: (dw + g * r, g * w),
        "input_gradient": lambda r, g, w: (g * w,),
        "weight_gradient": lambda dw, r, g: (dw + g * r,),
    }

    def call(spec):
        return lambda arrays: list(functions[spec.kind](*arrays)[: len(spec.outputs)])

    return {spec.name: call(spec) for spec in specs}


def number(value):
    """What the caller supplies for an input of the chain."""
    return {"w": 1.5, "d": 0.0, "x": 1.0 + (value.microbatch or 0)}[value.name[0]]


def inputs_of(work, make=lambda mesh, value: number(value)):
    """All inputs of a chain."""
    return {(mesh, value): make(mesh, value) for mesh, values in work.inputs.items() for value in values}


def driver_of(schedule, **options):
    """A driver for the chain whose transfers hand over the same number."""
    work = make_chain(schedule)
    return Driver(work.emit(), callables_of(work.specs), lambda array, value, source, target: array, **options)


def expected(schedule):
    """The chain's outputs by a loop over microbatches."""
    last, weight = schedule.num_stages, 1.5
    batch = [1.0 + k for k in range(schedule.num_microbatches)]
    if schedule.kinds == ("forward",):
        return {f"x{last}@{k}": x * weight**last for k, x in enumerate(batch)}
    gradients = {}
    for stage in range(last):
        terms = [x * weight**last * weight ** (last - 1 - stage) * x * weight**stage for x in batch]
        gradients[f"dw{stage}"] = sum(terms)
    return gradients


@contextlib.contextmanager
def ctrl_c():
    """A function that presses Ctrl-C and returns, in any thread but the main one, once the main thread has noticed."""
    noticed = []

    def handler(number, frame):
        noticed.append(number)
        raise KeyboardInterrupt

    def press():
        before = len(noticed)
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 30
        while len(noticed) == before and time.monotonic() < deadline:
            time.sleep(0.001)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield press
    finally:
        signal.signal(signal.SIGINT, previous)
