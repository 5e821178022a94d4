"""One plan for all processes: the first one makes it, and the others take it over.

In: what each process asks for, and a function that plans. Out: on every process the same plan as text. The processes meet first
(`meetings.py`), so that all ask for the same; then the first one plans and publishes the plan, or the error. So only one process
searches, and a search that a time limit ends cannot end differently elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable

from autopar.errors import PlanError
from autopar.runtime.meetings import Group

CHUNK_BYTES = 1 << 20
"""Plans are published in chunks of this many bytes."""


@dataclasses.dataclass(frozen=True)
class SharedPlan:
    """A plan that all processes of a group ask for. `topic` is the folder of their meeting."""

    group: Group
    topic: str
    question: str

    @classmethod
    def meet(cls, group: Group, question: str) -> SharedPlan:
        """Wait until all processes ask the same question. Raises PlanError on all of them if they do not."""
        return cls(group, group.meet(f"plans {question}"), question)

    def make(self, plan: Callable[[], str], *, within_s: float) -> str:
        """Return the result of `plan()` on the first process. The others wait for it, at most `within_s` seconds.

        An error of `plan` is raised on all: as it is on the first process, as a PlanError with its words on the others.
        """
        group = self.group
        if group.here == group.leader:
            return self._answer(plan)
        words = f"plans {self.question}"
        count = int(group.read(f"{self.topic}/answer/count", group.leader, words, limit_s=within_s, warns=False))
        packed = b"".join(group.read(f"{self.topic}/answer/{n}", group.leader, words) for n in range(count))
        answer: dict[str, str] = json.loads(zlib.decompress(packed))
        if "error" in answer:
            raise PlanError(f"process {group.leader} could not plan {self.question}: {answer['error']}")
        return answer["plan"]

    def _answer(self, plan: Callable[[], str]) -> str:
        """Plan, and publish the plan or the error."""
        try:
            text = plan()
        except BaseException as error:
            self._publish({"error": f"{type(error).__name__}: {error}"})
            raise
        self._publish({"plan": text})
        return text

    def _publish(self, answer: dict[str, str]) -> None:
        service, packed = self.group.service, zlib.compress(json.dumps(answer).encode())
        chunks = [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]
        for n, chunk in enumerate(chunks):
            service.key_value_set_bytes(f"{self.topic}/answer/{n}", chunk)
        service.key_value_set_bytes(f"{self.topic}/answer/count", str(len(chunks)).encode())
