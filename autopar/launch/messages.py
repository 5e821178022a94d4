"""What a worker tells its supervisor, as lines of JSON through a pipe that only the two of them have.

A beat says that the worker lives, how many steps it has done, and what it is doing. A note says why it ends, or that a step
stands still. What can go wrong: half a line, where the worker was killed while it wrote; it is left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

MessageKind = Literal["beat", "failed", "stalled", "going on"]
MOST_CHARACTERS = 2000
"""Of the words of a message: a pipe takes a line of up to 4,096 bytes whole or not at all."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One line.

    Attributes:
        kind: A beat; that the script failed; that a step stands still, or goes on.
        at_s: When it happened, by the machine's monotonic clock, which all processes share.
        steps: How many steps the worker has done since it started.
        words: What it is doing, or what has failed.
    """

    kind: MessageKind
    at_s: float
    steps: int = 0
    words: str = ""

    def line(self) -> bytes:
        """The message as it goes through the pipe."""
        cut = {**asdict(self), "words": self.words[:MOST_CHARACTERS]}
        text = json.dumps(cut)
        if len(text) > 4000:  # characters that JSON writes as six
            cut["words"] = self.words[: MOST_CHARACTERS // 6]
            text = json.dumps(cut)
        return f"{text}\n".encode()


class MessageReader:
    """Puts the bytes of a pipe together to messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [Message(**json.loads(line)) for line in lines]
