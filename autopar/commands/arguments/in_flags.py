"""Words about arguments of `parallelize`, in the flags of the command line.

In: a sentence, such as an error's. Out: the same with `--data-parallel` for `data_parallel()` and `--memory-limit` for
`memory_limit_bytes`. What can go wrong: words for which there is no flag; they stay.
"""

from __future__ import annotations

import functools
import re

_FLAGS = (
    (r"data_parallel\(\)", "--data-parallel"),
    (r"zero(\d)\(\)", r"--zero \1"),
    (r"mesh_shape=\[(.*?)\]", "--mesh "),
    (r"mesh_shape=\{(.*?)\}", "--mesh "),
    (r"num_stages=(\d+)", r"--stages \1"),
    (r"num_microbatches=(\d+)", r"--microbatches \1"),
    (r"virtual_stages=(\d+)", r"--virtual-stages \1"),
    (r"recompute='(\w+)'", r"--recompute \1"),
    (r"collectives=\[(.*?)\]", r"--collectives \1"),
    (r"memory_limit_bytes=(\d[\d_]*)", "--memory-limit "),
    (r"a higher memory_limit_bytes", "a higher --memory-limit"),
    (r"\bdevices=(\d+)", r"--devices \1"),
)

_AS_MESH = str.maketrans({" ": None, "'": None, ":": "="})
"""Shapes of meshes as the command line takes them, apart from their brackets."""


def in_flags(words: str) -> str:
    """Words about arguments of `parallelize`, in flags where there are any."""
    for pattern, flag in _FLAGS:
        words = re.sub(pattern, functools.partial(_with_value, flag), words)
    return words


def _with_value(flag: str, found: re.Match[str]) -> str:
    """The flag with the value that the words have; meshes and bytes as the command line takes them."""
    if flag == "--mesh ":
        return flag + found[1].strip("()").translate(_AS_MESH).rstrip(",")
    if flag == "--memory-limit ":
        return flag + found[1].replace("_", "")
    return found.expand(flag).replace("'", "").replace(", ", ",")
