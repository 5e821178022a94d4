"""One entry of the plan cache: a plan with the question that it answers, as the bytes of a file.

In: an `Entry`. Out: compressed JSON, and back. What can go wrong: the bytes are no entry, or that of another version or question;
PlanError says which. A checksum finds damage.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib

from autopar.errors import PlanError
from autopar.files.checked import ENTRY_SCHEMA, check_fields, load_text
from autopar.files.json_form import build

VERSION = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A plan that was found.

    Attributes:
        key: the digest of the question; see `key.py`.
        subject: the question in a few words, for people.
        plan: what its `to_json` wrote.
        sources: the lines of the program, each once, in the order in which its operations come from them.
        warnings: what the search warned of.
        phases: the phases that the plan's microbatches were cut by, `NamedPhases` as JSON; None if it has none.
        searched_s: if planning ended early, how many seconds it had; None if everything was compared.
        version: of this form.
    """

    key: str
    subject: str
    plan: str
    sources: tuple[str, ...]
    warnings: tuple[str, ...]
    phases: str | None
    searched_s: float | None
    version: int = VERSION

    def serves(self, planning_seconds: float | None) -> bool:
        """Whether a search with this limit would find nothing better."""
        return _limit(planning_seconds) <= _limit(self.searched_s)

    def add_search(self, seconds: float | None) -> Entry:
        """The entry after another search, of so many seconds, that found nothing better."""
        longest = max(_limit(self.searched_s), _limit(seconds))
        return dataclasses.replace(self, searched_s=None if longest == math.inf else longest)


def _limit(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def pack(entry: Entry) -> bytes:
    """The bytes of an entry."""
    return gzip.compress(json.dumps(dataclasses.asdict(entry)).encode(), mtime=0)


def unpack(packed: bytes, key: str) -> Entry:
    """The entry in a file's bytes; PlanError if they are not that of this question."""
    try:
        text = gzip.decompress(packed).decode()
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise PlanError(f"damaged, or no entry of the cache: {error}") from None
    what = "an entry of the cache"
    entry = build(Entry, check_fields(load_text(text, what), ENTRY_SCHEMA, what))
    if entry.key != key:
        raise PlanError(f"the entry of another question, {entry.key[:12]}")
    return entry
