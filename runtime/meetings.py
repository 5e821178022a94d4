"""Processes meet before they act together: either all are about to do the same, or all refuse alike.

In: on each process, words for what it is about to do. Out: nothing, or a PlanError that is the same on all of them. The words
travel over JAX's coordination service: each process publishes those of its n-th meeting, and the first process compares them and
publishes the outcome. Nothing has been launched by then, so processes that disagree can go on afterwards. What can go wrong: a
process never comes. If it ends in Python, it leaves a note. Otherwise the others wait `LIMIT_S` seconds, warn after `SILENCE_S`,
and then refuse alike. Only JAX notices a process that ends without a note, and it then ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from autopar.compat import Coordination, coordination
from autopar.errors import AutoparError, PlanError, warn
from autopar.events import reach

LIMIT_S = 1800.0
"""Seconds that a process waits for another one."""
SILENCE_S = 30.0
"""Seconds of waiting after which a process warns and names the process that it waits for."""
LOOK_S = 1.0
"""Seconds between two looks for signals to this process, and for notes of processes that ended, while it waits."""
MAX_WORDS = 4000
"""The most characters of the words that are published. A digest tells longer words apart."""
KEPT_MEETINGS = 64
"""The first process deletes meetings in blocks of this many. It keeps a block until the next but one begins."""
MANY = 4
"""With more missing processes than this, the first process asks for all words that have come at once."""


ENDED = "autopar/ended/"
"""The folder in the service that holds the notes of processes that ended."""
LINGER_S = 2 * LOOK_S
"""Seconds that process 0, which runs the service, delays its end after an error, so that the others can read its note."""

_GROUPS: dict[tuple[int, ...], Group] = {}


class Group:
    """The processes that meet, as the process `here` sees them. The first of them compares the words."""

    def __init__(self, service: Coordination, here: int, processes: Sequence[int], *, limit_s: float = LIMIT_S) -> None:
        self.service, self.here, self.processes, self.limit_s = service, here, tuple(processes), limit_s
        self.leader, *self.others = self.processes
        self._name = "-".join(map(str, self.processes))
        if len(self._name) > 64:  # a folder of the service
            self._name = f"{self.leader}-{hashlib.sha256(self._name.encode()).hexdigest()[:16]}"
        self._numbers = itertools.count(1)
        self._interrupted = f"process {here} was interrupted while it waited for the others"

    def meet(self, words: str) -> str:
        """Wait until all processes are about to do the same; returns the folder in the service that is theirs from now on.

        Args:
            words: what this process is about to do, such as "runs step (...)".

        Raises:
            PlanError: some process is about to do something else, cannot do it, or does not come.
        """
        number, topic = self._open()
        if self.here == self.leader:
            self._forget(number)
            outcome = self._compare(topic, words)
        else:
            self._publish(f"{topic}/words {self.here}", {"words": words[:MAX_WORDS], "digest": _digest(words)})
            outcome = self._hear(topic, words)
        if outcome:
            raise PlanError(outcome)
        return topic

    def refuse(self, error: BaseException) -> None:
        """Take part in a meeting of which this process cannot do its part, and tell the others why."""
        _, topic = self._open()
        told = f"process {self.here} cannot go on: {type(error).__name__}: {str(error).partition(chr(10))[0]}"[
            :MAX_WORDS
        ]
        if self.here == self.leader:
            self._conclude(topic, told)
        else:
            self._publish(f"{topic}/words {self.here}", {"error": told})

    def leave(self) -> None:
        """Leave a note for those that wait in a meeting: this process ends, and why."""
        error = getattr(sys, "last_value", None)
        why = "" if error is None else f" with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        note = f"process {self.here} has ended{why}"[:MAX_WORDS]
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service has ended, or the note exists
            self.service.key_value_set_bytes(f"{ENDED}{self.here}", note.encode())
            if why and self.here == 0:
                time.sleep(LINGER_S)

    def _open(self) -> tuple[int, str]:
        number = next(self._numbers)
        return number, f"autopar/meeting/{self._name}/{number // KEPT_MEETINGS}/{number}"

    def _compare(self, topic: str, words: str) -> str:
        """Compare and publish the outcome, as the first process. It is empty if all are about to do the same."""
        outcome = self._interrupted
        try:
            outcome = self._judge(words, self._collect(topic, words))
        except PlanError as error:
            outcome = str(error)
        finally:
            outcome = self._conclude(topic, outcome)
        return outcome

    def _hear(self, topic: str, words: str) -> str:
        """Wait for the outcome, as one of the other processes. They decide it themselves if the first one does not come.

        They wait twice as long, because the first process may come late and then wait for others itself.
        """
        try:
            message = json.loads(self.read(f"{topic}/outcome", self.leader, words, limit_s=2 * self.limit_s))
        except PlanError as error:
            return self._conclude(topic, str(error))
        except BaseException:
            self._conclude(topic, self._interrupted)  # the others go on only if the first process has said so already
            raise
        return str(message["outcome"])

    def _conclude(self, topic: str, outcome: str) -> str:
        """Publish the outcome. The first to publish decides; a late process takes over what was decided without it."""
        try:
            self._publish(f"{topic}/outcome", {"outcome": outcome})
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                decided: dict[str, str] = json.loads(self.read(f"{topic}/outcome", self.leader, outcome))
                return decided["outcome"]
            if not outcome:
                raise
        return outcome

    def _judge(self, words: str, found: dict[int, dict[str, str]]) -> str:
        """Say what is wrong with the words of the other processes; empty if nothing is."""
        failed = [found[process]["error"] for process in self.others if "error" in found[process]]
        if failed:
            return f"{failed[0]}. Processes {self._name} act together; this one was about to go on: {words[:MAX_WORDS]}"
        odd = [process for process in self.others if found[process]["digest"] != _digest(words)]
        if not odd:
            return ""
        listed = ", ".join(f"process {process} {found[process]['words']}" for process in odd[:3])
        return (
            f"process {self.here} {words[:MAX_WORDS]}, {listed}{', ...' if len(odd) > 3 else ''}: every process has to make the "
            "same calls in the same order, with steps of the same code, shapes and options"
        )

    def _collect(self, topic: str, words: str) -> dict[int, dict[str, str]]:
        """Collect what all other processes have published."""
        found: dict[int, dict[str, str]] = {}
        for process in self.others:
            if process not in found:
                found[process] = json.loads(self.read(f"{topic}/words {process}", process, words))
            if len(self.others) - len(found) > MANY:
                come = dict(self.service.key_value_dir_get_bytes(f"{topic}/"))
                for other in self.others:
                    if f"{topic}/words {other}" in come:
                        found[other] = json.loads(come[f"{topic}/words {other}"])
        return found

    def read(self, key: str, process: int, words: str, *, limit_s: float | None = None, warns: bool = True) -> bytes:
        """Wait for what another process publishes. Signals to this process are handled meanwhile.

        Args:
            key: the entry of the service.
            process: the number of the process that publishes it.
            words: what this process is about to do, for errors.
            limit_s: the most seconds to wait; by default the limit of the group.
            warns: whether to warn and name the process after `SILENCE_S`.
        """
        if not warns:
            return self._read(key, process, words, limit_s=limit_s, warns=False)
        reach("waiting", f"process {process}, while process {self.here} {words}")
        try:
            return self._read(key, process, words, limit_s=limit_s, warns=True)
        finally:
            reach("heard", f"process {process}")

    def _read(self, key: str, process: int, words: str, *, limit_s: float | None, warns: bool) -> bytes:
        began, limit_s, is_told = time.monotonic(), self.limit_s if limit_s is None else limit_s, False
        while True:
            try:
                return self.service.blocking_key_value_get_bytes(key, int(LOOK_S * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PlanError(self._describe_silence(process, words, str(error))) from error
                self._refuse_if_ended(process, words)
                waited_s = time.monotonic() - began
                if waited_s > limit_s:
                    raise PlanError(
                        f"process {self.here} {words}, and process {process} has not done so within {limit_s:.0f} s: every "
                        "process has to make the same calls in the same order"
                    ) from error
                if warns and waited_s > SILENCE_S and not is_told:
                    is_told = True
                    self._warn_of_silence(process, words, waited_s)

    def _refuse_if_ended(self, process: int, words: str) -> None:
        notes = dict(self.service.key_value_dir_get_bytes(ENDED))
        if f"{ENDED}{process}" in notes:
            raise PlanError(
                f"{notes[f'{ENDED}{process}'].decode()}, while process {self.here} {words}. Every process "
                "has to make the same calls. If that one failed, end all of them, and start again from a saved state."
            )

    def _warn_of_silence(self, process: int, words: str, waited_s: float) -> None:
        whom = f"process {process}" if self.here == self.leader else f"process {process}, or for another one with it,"
        warn(
            f"process {self.here} {words}, and has waited for {whom} for {waited_s:.0f} s. If a process has ended, JAX ends the "
            "others too, with words of its own; start all of them again from a saved state."
        )

    def _describe_silence(self, process: int, words: str, said: str) -> str:
        first = said.partition("\n")[0]
        return (
            f"process {self.here} {words}, and cannot hear of process {process}: JAX's coordination service, which runs in "
            f"process 0, does not answer ({first}). Start all processes again."
        )

    def _publish(self, key: str, message: dict[str, str]) -> None:
        self.service.key_value_set_bytes(key, json.dumps(message).encode())

    def _forget(self, number: int) -> None:
        """Delete old meetings. All processes have read their outcomes, because they have come to later ones."""
        block = number // KEPT_MEETINGS
        if number % KEPT_MEETINGS == 0 and block > 1:
            self.service.key_value_delete(f"autopar/meeting/{self._name}/{block - 2}/")


@contextlib.contextmanager
def refusing_together(group: Group | None) -> Iterator[None]:
    """Open a context that tells the others of an error of this process alone, so that they refuse instead of waiting."""
    try:
        yield
    except AutoparError as error:
        if group is not None:
            group.refuse(error)
        raise


def _leave_all() -> None:
    for group in _GROUPS.values():
        group.leave()


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def group_of(devices: Callable[[], Sequence[jax.Device]]) -> Group | None:
    """Return the group of the processes that have the devices; None if that is one process, or `jax.distributed` is not used."""
    service = coordination()
    if service is None:
        return None
    processes = tuple(sorted({device.process_index for device in devices()}))
    if len(processes) < 2:
        return None
    if not _GROUPS:
        atexit.register(_leave_all)  # runs before the exit function of JAX, while the service exists
    return _GROUPS.setdefault(processes, Group(service, jax.process_index(), processes))
