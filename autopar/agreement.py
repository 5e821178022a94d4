"""One plan for all processes: the first makes it, the others take it over.

In: what each process asks for, and a function that plans. Out: on every process the same plan as text. JAX's coordination service
carries it: each process counts the plans it asks for, and publishes its n-th question; the first process publishes the answer,
and goes on when all have asked the same. So nobody searches twice, and a search that the clock ends cannot end differently
elsewhere. What can go wrong: processes that ask for different things, or in another order; each is told both questions. A
process that never asks is waited for no longer than `ANSWER_S`.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence

import jax

from autopar.compat import Coordination, coordination
from autopar.errors import PlanError

ANSWER_S = 1800.0
LOOK_S = 5.0
CHUNK_BYTES = 1 << 20


def is_needed(devices: Callable[[], Sequence[jax.Device]]) -> bool:
    """Whether the devices are those of several processes; without `jax.distributed` nobody asks for them."""
    return coordination() is not None and len({device.process_index for device in devices()}) > 1


def agreed(question: str, devices: Sequence[jax.Device], plan: Callable[[], str]) -> str:
    """`plan()` of the first process among the devices, on each of their processes; PlanError if their questions differ.

    An error of the first process is raised on all: its own there, a PlanError with its words elsewhere.
    """
    processes = sorted({device.process_index for device in devices})
    service = coordination()
    assert service is not None, "several processes without jax.distributed"
    here, leader = jax.process_index(), processes[0]
    group = "-".join(map(str, processes))
    number = service.key_value_increment(f"autopar/asked/{group}/{here}", 1)
    topic = f"autopar/plan/{group}/{number}"
    if here == leader:
        return _answer(service, topic, question, plan, others=processes[1:])
    _publish(service, f"{topic}/question {here}", {"question": question})
    answer = _await(service, f"{topic}/answer", question, of=leader)
    if "error" in answer:
        raise PlanError(f"process {leader} could not plan {question}: {answer['error']}")
    return answer["plan"]


def _answer(service: Coordination, topic: str, question: str, plan: Callable[[], str], *, others: Sequence[int]) -> str:
    try:
        text = plan()
    except BaseException as error:
        _publish(service, f"{topic}/answer", {"question": question, "error": f"{type(error).__name__}: {error}"})
        raise
    _publish(service, f"{topic}/answer", {"question": question, "plan": text})
    for other in others:
        _await(service, f"{topic}/question {other}", question, of=other)
    return text


def _publish(service: Coordination, key: str, message: dict[str, str]) -> None:
    packed = zlib.compress(json.dumps(message).encode())
    chunks = [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]
    for n, chunk in enumerate(chunks):
        service.key_value_set_bytes(f"{key}/{n}", chunk)
    service.key_value_set_bytes(f"{key}/count", str(len(chunks)).encode())


def _await(service: Coordination, key: str, question: str, *, of: int) -> dict[str, str]:
    """What another process publishes; PlanError if it is about another question."""
    began, here = time.monotonic(), jax.process_index()
    count = None
    while count is None:
        try:
            count = int(service.blocking_key_value_get_bytes(f"{key}/count", int(LOOK_S * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if time.monotonic() - began > ANSWER_S:
                raise PlanError(
                    f"process {here} plans {question}, and process {of} has not done so within {ANSWER_S:.0f} s: every process "
                    "has to make the same calls in the same order"
                ) from error
    packed = b"".join(service.blocking_key_value_get_bytes(f"{key}/{n}", 60_000) for n in range(count))
    message: dict[str, str] = json.loads(zlib.decompress(packed))
    if message["question"] != question:
        raise PlanError(
            f"process {here} plans {question}, process {of} plans {message['question']}: every process has to make the same "
            "calls in the same order, with steps of the same code, shapes and options"
        )
    return message
