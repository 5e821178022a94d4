"""A digest of a program, by which a plan recognises its step."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from autopar.compat import Literal as JaxLiteral
from autopar.program.program import Program


def fingerprint_of(program: Program) -> str:
    """A digest of the program's operations, shapes and structure; equal programs have equal digests."""
    numbers: dict[Any, int] = {}
    described = functools.cache(str)
    digest = hashlib.sha256()

    def name(atom: Any) -> str:
        if isinstance(atom, JaxLiteral):
            return f"{atom.val}:{described(atom.aval)}"
        return f"v{numbers.setdefault(atom, len(numbers))}:{described(atom.aval)}"

    for var in program.invars:
        digest.update(name(var).encode())
    for eqn in program.walk():
        line = f"{eqn.primitive.name} {[name(v) for v in eqn.invars]} {[name(v) for v in eqn.outvars]}\n"
        digest.update(line.encode())
    digest.update(str([name(v) for v in program.outvars]).encode())
    return digest.hexdigest()[:16]
