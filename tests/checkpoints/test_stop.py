"""A signal that any of several processes gets ends the run of all before the same step."""

import itertools
import random
import signal

from autopar.training import stop


class Table:
    """The coordination service of processes that live in one."""

    def __init__(self):
        self.entries = {}

    def key_value_set_bytes(self, key, value):
        if key in self.entries:
            raise stop.jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.entries[key] = value

    def key_value_dir_get_bytes(self, key):
        return [(name, value) for name, value in self.entries.items() if name.startswith(key)]


def test_all_processes_stop_before_the_same_step_whoever_is_told_when(monkeypatch):
    """A process asks before a step once all others have asked before the step in front of it, as steps start together."""
    for seed in range(100):
        chance, table = random.Random(seed), Table()
        monkeypatch.setattr(stop, "coordination", lambda table=table: table)
        monkeypatch.setattr(stop, "_RUNS", itertools.repeat(seed))
        requests = [stop.StopRequest(several=True) for _ in range(chance.randint(2, 4))]
        told = {chance.randrange(len(requests)): chance.randrange(10) for _ in range(chance.randint(1, 3))}
        ended = ends_of(requests, told, chance)
        assert len({*ended.values()}) == 1, seed
        assert min(told.values()) < ended[0] <= min(told.values()) + 1, seed
        assert {request.name for request in requests} == {"SIGTERM"}


def ends_of(requests, told, chance):
    """Before which step each process ends, if some are told before steps of their own."""
    asked, ended = [0] * len(requests), {}
    while len(ended) < len(requests):
        turn = chance.choice([n for n in range(len(requests)) if n not in ended and asked[n] <= min(asked)])
        if told.get(turn) == asked[turn]:
            requests[turn]._on_signal(signal.SIGTERM, None)
        if requests[turn].is_due(asked[turn]):
            ended[turn] = asked[turn]
        asked[turn] += 1
    return ended
