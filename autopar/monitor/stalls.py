"""Find out which step stands still, where, and for how long.

In: lines that say where each mesh is, at one time after another. Out: a description, once, when no line has changed for too long.
`told` is empty again when a line changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class StallWatch:
    """The lines seen so far, each with the time since when it has been the same. `told` describes a stall that lasts."""

    limit_s: float
    told: str = ""
    _since: dict[str, float] = field(default_factory=dict)

    def look(self, title: str, lines: Sequence[str], now_s: float, *, patience: float = 1.0) -> str | None:
        """Take the lines of this time. Returns the description of a stall when it is found, and None otherwise.

        Args:
            title: what is under way, such as a step and the number of its call.
            lines: where each mesh is; empty if that is not known.
            now_s: the time in seconds.
            patience: the factor by which the step may stand still longer than `limit_s`.
        """
        self._since = {line: self._since.get(line, now_s) for line in (title, *lines)}
        for_s = now_s - max(self._since.values())
        if for_s < self.limit_s * patience:
            self.told = ""
            return None
        if self.told:
            return None
        listed = "".join(f"\n  {line} (for {now_s - self._since[line]:.1f} s)" for line in lines)
        self.told = f"{title} stands still:{listed}"
        return self.told

    def forget(self) -> bool:
        """Forget all lines, because nothing is under way. Returns whether a stall had been reported."""
        was_told, self.told, self._since = bool(self.told), "", {}
        return was_told
