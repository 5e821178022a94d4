"""The messages of a worker to its supervisor: lines of JSON through a pipe that only the two of them have.

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
    """One message, which is one line.

    Attributes:
        kind: A beat; that the script failed; that a step stands still, or goes on.
        at_s: The time in seconds of the monotonic clock, which all processes of the machine share.
        steps: The number of steps that the worker has done since it started.
        words: What the worker is doing, or the error that it failed with.
    """

    kind: MessageKind
    at_s: float
    steps: int = 0
    words: str = ""

    def line(self) -> bytes:
        """Return the message as bytes for the pipe."""
        cut = {**asdict(self), "words": self.words[:MOST_CHARACTERS]}
        text = json.dumps(cut)
        if len(text) > 4000:  # characters that JSON writes as six
            cut["words"] = self.words[: MOST_CHARACTERS // 6]
            text = json.dumps(cut)
        return f"{text}\n".encode()


class MessageReader:
    """Makes messages of the bytes of a pipe."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Take the next bytes. Returns the messages that are complete with them."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [Message(**json.loads(line)) for line in lines]
