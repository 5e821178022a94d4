"""Which step stands still, where, and for how long.

In: again and again, lines that say where things are. Out: once, a description, when all of them have been the same for too long;
and once more, when they go on. A line that has not changed is one that stands still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class StallWatch:
    """What was seen so far. `told` is what was said of a stall that lasts."""

    limit_s: float
    told: str = ""
    _since: dict[str, float] = field(default_factory=dict)

    def look(self, title: str, lines: Sequence[str], now_s: float, *, patience: float = 1.0) -> str | None:
        """Take the lines of this moment; returns what is to be said of them, once, if they stand still.

        Args:
            title: what is under way, such as a step and the number of its call.
            lines: where it is; none if nothing is under way.
            now_s: the moment.
            patience: how many times longer than usual it may stand still.
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
        """Nothing is under way any more; returns whether something stood still before."""
        was_told, self.told, self._since = bool(self.told), "", {}
        return was_told
