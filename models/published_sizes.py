"""Sizes by the names that papers give them, such as 39B of GPT: one table, `published_sizes.json`, with its sources.

In: a model's name. Out: for each name of a size the fields of the model's config that the source states; what it leaves open has
the config's default. What can go wrong: an unknown name; the error lists those there are.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

Sizes: TypeAlias = Mapping[str, int | float | str | bool]
_FILE = Path(__file__).with_name("published_sizes.json")


class PublishedSize(NamedTuple):
    """Fields of a model's config by name, and the paper that states them."""

    sizes: Sizes
    source: str


@functools.cache
def published_sizes(model: str) -> Mapping[str, PublishedSize]:
    """The published sizes of a model by name, empty if there are none."""
    tables = [table for table in json.loads(_FILE.read_text(encoding="utf-8")) if model in table["models"]]
    return {
        name: PublishedSize({**table["common"], **sizes}, table["source"])
        for table in tables
        for name, sizes in table["sizes"].items()
    }


def find_size(model: str, name: str) -> Sizes:
    """The sizes of a published model; the name in capitals or not. Raises ValueError with the names that there are."""
    known = published_sizes(model)
    for word, found in known.items():
        if word.lower() == name.strip().lower():
            return found.sizes
    raise ValueError(f"no size {name!r} of {model}: the published ones are {', '.join(known)}")
