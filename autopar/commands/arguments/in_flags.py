"""Words about arguments of Python, in the flags of the command line.

In: a sentence, such as an error's. Out: the same with `--data-parallel` for `data_parallel()` and `--memory-limit` for
`memory_limit_bytes`, and without the advice that needs Python. What can go wrong: words for which there is no flag; they stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_IN_PYTHON_ALONE = (
    r"; Guard\(action='skip'\) goes on without it, and Guard\(action='back'\) after it",
    r", or say where the loss is, with find_loss=lambda rest: \.\.\.",
)
"""Advice beside other advice that the command line can follow."""
_NAME = r"(?<![\w/.`'\"-])"
"""Before the name of an argument, which is no part of a path or of another word."""


def _mesh(found: re.Match[str]) -> str:
    """Shapes as `--mesh` takes them: 2,4 or data=2,model=4, with / between those of stages."""
    shapes = re.findall(r"\(([^)]*)\)|(\.\.\.)", found[1]) or [(found[1], "")]
    plain = ["".join(shape).translate(_WITHOUT_PYTHON).strip(",") for shape in shapes]
    return f"--mesh {'/'.join(plain)}"


def _bytes(found: re.Match[str]) -> str:
    """The limit as people write it, rounded up, as a plan needs all of it."""
    count = int(found[1].replace("_", ""))
    unit, size = ("MiB", 2**20) if count >= 2**20 else ("KiB", 2**10)
    return f"--memory-limit {math.ceil(count / size)}{unit}"


def _list(found: re.Match[str]) -> str:
    return f"--collectives {found[1].translate(_WITHOUT_PYTHON)}"


_WITHOUT_PYTHON = str.maketrans({" ": None, "'": None, ":": "="})
_FLAGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"data_parallel\(\)", "--data-parallel"),
    (r"zero(\d)\(\)", r"--zero \1"),
    (r"mesh_shape=\[(.*?)\]", _mesh),
    (r"mesh_shape=\{(.*?)\}", _mesh),
    (r"mesh_shape=\((.*?)\)", _mesh),
    (r"num_microbatches=(\d+), or on one mesh 'auto'", r"--microbatches \1, or on one mesh leave that open"),
    (r"num_stages=(\d+)", r"--stages \1"),
    (r"num_microbatches=(\d+)", r"--microbatches \1"),
    (r"virtual_stages=(\d+)", r"--virtual-stages \1"),
    (r"batch_statistics='(\w+)'", r"--batch-statistics \1"),
    (r"schedule='([\w-]+)'", r"--schedule \1"),
    (r"recompute='(\w+)'", r"--recompute \1"),
    (r"collectives=\[(.*?)\]", _list),
    (r"memory_limit_bytes=(\d[\d_]*)", _bytes),
    (r"\bdevices=(\d+)", r"--devices \1"),
    (r"`plan\.show\(full=True\)` and (`autopar .*? --full`) list all", r"\1 lists all"),
    (rf"{_NAME}num_microbatches, recompute and layouts", "--microbatches, --recompute and layouts"),
    (rf"{_NAME}num_stages\b", "--stages"),
    (rf"{_NAME}num_microbatches\b", "--microbatches"),
    (rf"{_NAME}virtual_stages\b", "--virtual-stages"),
    (rf"{_NAME}batch_statistics\b", "--batch-statistics"),
    (rf"{_NAME}mesh_shape\b", "--mesh"),
    (rf"{_NAME}memory_limit_bytes\b", "--memory-limit"),
    (rf"{_NAME}planning_seconds\b", "--planning-seconds"),
)


def in_flags(words: str) -> str:
    """Words about arguments of Python, in flags where there are any."""
    for advice in _IN_PYTHON_ALONE:
        words = re.sub(advice, "", words)
    for pattern, flag in _FLAGS:
        words = re.sub(pattern, flag, words)
    return words
