"""One plan for all processes: the first makes it, the others take it over.

In: what each process asks for, and a function that plans. Out: on every process the same plan as text. JAX's coordination service
carries it: each process counts the plans it asks for, and the first process publishes its n-th answer with the question. So
nobody searches twice, and a search that the clock ends cannot end differently elsewhere. What can go wrong: processes that ask
for different things, or in another order; each is told both questions. A process that never asks is waited for no longer than
`ANSWER_S`.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence

import jax

from autopar.compat import Coordination, coordination
from autopar.errors import AutoparError, PlanError

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
    group = "-".join(map(str, processes))
    number = service.key_value_increment(f"autopar/asked/{group}/{jax.process_index()}", 1)
    topic = f"autopar/plan/{group}/{number}"
    if jax.process_index() == processes[0]:
        return _answer(service, topic, question, plan)
    return _await(service, topic, question, leader=processes[0])


def _answer(service: Coordination, topic: str, question: str, plan: Callable[[], str]) -> str:
    try:
        text = plan()
    except AutoparError as error:
        _publish(service, topic, {"question": question, "error": f"{type(error).__name__}: {error}"})
        raise
    _publish(service, topic, {"question": question, "plan": text})
    return text


def _publish(service: Coordination, topic: str, answer: dict[str, str]) -> None:
    packed = zlib.compress(json.dumps(answer).encode())
    chunks = [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]
    for n, chunk in enumerate(chunks):
        service.key_value_set_bytes(f"{topic}/{n}", chunk)
    service.key_value_set_bytes(f"{topic}/count", str(len(chunks)).encode())


def _await(service: Coordination, topic: str, question: str, *, leader: int) -> str:
    began = time.monotonic()
    count = None
    while count is None:
        try:
            count = int(service.blocking_key_value_get_bytes(f"{topic}/count", int(LOOK_S * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if time.monotonic() - began > ANSWER_S:
                raise PlanError(
                    f"process {leader} has not planned {question} within {ANSWER_S:.0f} s, and process {jax.process_index()} "
                    "waits for it: every process has to make the same calls in the same order"
                ) from error
    packed = b"".join(service.blocking_key_value_get_bytes(f"{topic}/{n}", 60_000) for n in range(count))
    answer = json.loads(zlib.decompress(packed))
    if answer["question"] != question:
        raise PlanError(
            f"process {jax.process_index()} plans {question}, process {leader} plans {answer['question']}: every process has to "
            "make the same calls in the same order, with steps of the same code, shapes and options"
        )
    if "error" in answer:
        raise PlanError(f"process {leader} could not plan {question}: {answer['error']}")
    return str(answer["plan"])
