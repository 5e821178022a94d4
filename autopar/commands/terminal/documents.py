"""Where JSON documents go. In: whether a command prints one. Out: standard output, which is for documents alone then."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import TextIO

_KEPT: contextvars.ContextVar[TextIO | None] = contextvars.ContextVar("documents", default=None)
"""Standard output, if it is kept for documents."""


@contextlib.contextmanager
def documents_alone(*, as_json: bool) -> Iterator[None]:
    """A context in which standard output is for JSON documents alone, if there are any: users' code prints on standard error."""
    if not as_json:
        yield
        return
    token = _KEPT.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _KEPT.reset(token)


def output_for_documents() -> TextIO:
    """Where a document is printed."""
    return _KEPT.get() or sys.stdout
