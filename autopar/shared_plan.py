"""One plan for all processes: the first makes it, the others take it over.

In: what each process asks for, and a function that plans. Out: on every process the same plan as text. JAX's coordination service
carries it: each process counts the plans that it asks for, and publishes its n-th question. The first process publishes the
answer, and goes on when all have asked the same question. So only one process searches, and a search that a time limit ends
cannot end differently elsewhere. What can go wrong: processes ask for different things, or in another order; each is told both
questions. A process that never asks is waited for `ANSWER_S` seconds longer than a search may take.
"""

from __future__ import annotations

import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Sequence

import jax

from autopar.compat import Coordination, coordination
from autopar.errors import PlanError

ANSWER_S = 1800.0
"""Seconds that a process waits for another one's question or answer, beside those that the search may take."""
LOOK_S = 5.0
"""Seconds between two looks at this process's signals while it waits."""
CHUNK_BYTES, CHUNK_MS = 1 << 20, 60_000
"""Messages are published in chunks of this many bytes, each of which must arrive within this many milliseconds."""


def is_needed(devices: Callable[[], Sequence[jax.Device]]) -> bool:
    """Whether the devices belong to several processes; without `jax.distributed` they are not asked for."""
    return coordination() is not None and len({device.process_index for device in devices()}) > 1


def agree_on_plan(
    question: str, devices: Sequence[jax.Device], plan: Callable[[], str], *, answer_s: float = ANSWER_S
) -> str:
    """`plan()` of the first process among the devices, on each of their processes; PlanError if their questions differ.

    Each waits `answer_s` seconds for the others. Only the first one searches, so its clock alone limits the search.
    An error of the first process is raised on all: its own there, a PlanError with its words elsewhere.
    """
    service = coordination()
    assert service is not None, "several processes without jax.distributed"
    processes = tuple(sorted({device.process_index for device in devices}))
    return Group(service, jax.process_index(), processes, answer_s).agree(question, plan)


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes that plan together, as the process `here` sees them; the first is the one that plans."""

    service: Coordination
    here: int
    processes: tuple[int, ...]
    answer_s: float = ANSWER_S

    def agree(self, question: str, plan: Callable[[], str]) -> str:
        """See `agree_on_plan`."""
        leader, *others = self.processes
        group = "-".join(map(str, self.processes))
        number = self.service.key_value_increment(f"autopar/asked/{group}/{self.here}", 1)
        topic = f"autopar/plan/{group}/{number}"
        if self.here == leader:
            text = self._answer(topic, question, plan)
            for other in others:
                self._await(f"{topic}/question {other}", question, of=other)
            return text
        _publish(self.service, f"{topic}/question {self.here}", {"question": question})
        answer = self._await(f"{topic}/answer", question, of=leader)
        if "error" in answer:
            raise PlanError(f"process {leader} could not plan {question}: {answer['error']}")
        return answer["plan"]

    def _answer(self, topic: str, question: str, plan: Callable[[], str]) -> str:
        """Plan, and publish the plan or the error."""
        try:
            text = plan()
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
            _publish(self.service, f"{topic}/answer", {"question": question, "error": words})
            raise
        _publish(self.service, f"{topic}/answer", {"question": question, "plan": text})
        return text

    def _await(self, key: str, question: str, *, of: int) -> dict[str, str]:
        """What another process publishes; PlanError if it is about another question."""
        count = self._count(key, question, of=of)
        packed = b"".join(self.service.blocking_key_value_get_bytes(f"{key}/{n}", CHUNK_MS) for n in range(count))
        message: dict[str, str] = json.loads(zlib.decompress(packed))
        if message["question"] != question:
            raise PlanError(
                f"process {self.here} plans {question}, process {of} plans {message['question']}: every process has to make "
                "the same calls in the same order, with steps of the same code, shapes and options"
            )
        return message

    def _count(self, key: str, question: str, *, of: int) -> int:
        """The number of chunks that another process publishes; waits for it, and looks at this process's signals meanwhile."""
        began = time.monotonic()
        while True:
            try:
                return int(self.service.blocking_key_value_get_bytes(f"{key}/count", int(LOOK_S * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    first = str(error).partition("\n")[0]
                    raise PlanError(
                        f"process {self.here} plans {question}, and cannot hear of process {of}: JAX's coordination service, "
                        f"which runs in process 0, does not answer ({first}). Start all processes again."
                    ) from error
                if time.monotonic() - began > self.answer_s:
                    raise PlanError(
                        f"process {self.here} plans {question}, and process {of} has not done so within "
                        f"{self.answer_s:.0f} s: every process has to make the same calls in the same order"
                    ) from error


def _publish(service: Coordination, key: str, message: dict[str, str]) -> None:
    packed = zlib.compress(json.dumps(message).encode())
    chunks = [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]
    for n, chunk in enumerate(chunks):
        service.key_value_set_bytes(f"{key}/{n}", chunk)
    service.key_value_set_bytes(f"{key}/count", str(len(chunks)).encode())
