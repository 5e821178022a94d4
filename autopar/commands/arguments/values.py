"""Reads the values of arguments: models, sizes in bytes, mesh shapes, layouts. Each error says what is accepted."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from autopar.errors import ArgumentError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from autopar import Replicated, Split
    from autopar.models import ModelEntry
    from autopar.models.published_sizes import Sizes

    Layout: TypeAlias = PartitionSpec | Replicated | Split

_BYTE_FACTORS = {"B": 1} | {
    f"{letter}{unit}": base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("KMGT", start=1)
}
_FACTORS_BY_NAME = {name.lower(): factor for name, factor in _BYTE_FACTORS.items()}

MeshShape = tuple[int, ...] | dict[str, int]


def model_entry(name: str) -> ModelEntry:
    """The registry's entry of a model; ArgumentError names the models there are."""
    from autopar.models import MODELS

    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        nearest = f"; did you mean {close[0]}? The" if close else ": the"
        raise ArgumentError(
            f"no model {name!r}{nearest} models are {', '.join(MODELS)}; for a step of your own give module:function"
        )
    return MODELS[name]


def is_model(name: str) -> bool:
    """Whether a word names a model, or a step as module:function, and no file."""
    from autopar.models import MODELS

    return not Path(name).exists() and (name in MODELS or ":" in name)


def byte_count(text: str) -> int:
    """16GB (10^9) or 16GiB (2^30); a plain number is bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([A-Za-z]*)", text.strip())
    factor = _FACTORS_BY_NAME.get((match[2] or "B").lower()) if match else None
    if match and factor and float(match[1]) * factor < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte")
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write a number and one of {', '.join(_BYTE_FACTORS)}, such as 16GB or 16GiB"
        )
    return int(float(match[1]) * factor)


def mesh_shape(text: str) -> MeshShape:
    """2,4 (axes x, y) or data=2,model=4."""
    parts = [re.fullmatch(r"(?:([A-Za-z_]\w*) *= *)?([1-9]\d*)", part.strip()) for part in text.split(",")]
    sizes = [int(part[2]) for part in parts if part]
    names = dict.fromkeys(part[1] for part in parts if part and part[1])
    if len(sizes) != len(parts) or len(names) not in (0, len(parts)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh{_why_no_mesh(text)}; write the sizes of its axes, such as 2,4, or with names, such as "
            "data=2,model=4"
        )
    return dict(zip(names, sizes, strict=True)) if names else tuple(sizes)


def _why_no_mesh(text: str) -> str:
    """What is wrong with the sizes or the names of a mesh, if it has any."""
    names, sizes = zip(*(part.replace(" ", "").rpartition("=")[::2] for part in text.split(",")), strict=True)
    if not all(re.fullmatch(r"-?\d+", size) for size in sizes):
        return ""
    if any(int(size) < 1 for size in sizes):
        return ", as each axis has at least one device"
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        return ", as each axis has a name of its own"
    return ", as either all axes have names or none" if 0 < len(named) < len(names) else ""


def mesh_shapes(text: str) -> tuple[MeshShape, ...]:
    """One mesh, or several with / between them, one for each stage of a pipeline: 1,2/1,2/1,4."""
    return tuple(map(mesh_shape, text.split("/")))


def mesh_size(shape: MeshShape) -> int:
    """How many devices a mesh has."""
    return math.prod(shape.values() if isinstance(shape, dict) else shape)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"\d+", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas between them."""
    return tuple(positive(word) for word in text.split(","))


def byte_counts(text: str) -> tuple[int, ...]:
    """Sizes in bytes, with commas between them."""
    return tuple(byte_count(word) for word in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Words with commas between them."""
    found = tuple(word.strip() for word in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has nothing before or after a comma")
    return found


def seconds(text: str) -> float | None:
    """A positive number of seconds, or none for no limit."""
    if text.strip().lower() == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds, or none for no limit")
    return number


def cluster(text: str) -> str:
    """A cluster preset's name or a cluster file's path, which can be read; or auto."""
    from autopar.cost_model.hardware import find_cluster

    try:
        if text != "auto":
            find_cluster(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def clusters(text: str) -> tuple[str, ...]:
    """Presets and files, with commas between them; each once."""
    found = tuple(dict.fromkeys(cluster(word) for word in names(text)))
    if "auto" in found:
        raise argparse.ArgumentTypeError("auto is no cluster to compare with others: name presets or files")
    return found


def constraint(text: str) -> tuple[str, str]:
    """GLOB=SPEC as (glob, spec); `layout` reads the spec."""
    glob, equals, spec = text.rpartition("=")
    if not equals or not glob or not _is_layout(spec):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not GLOB=SPEC; SPEC is, for each dimension, an axis, axes joined by +, or - for a whole one, "
            "such as state/params/*/kernel=-,x; or it is replicated, split or split:x"
        )
    return glob, spec


def _is_layout(spec: str) -> bool:
    axes = r"[A-Za-z_]\w*(?:\+[A-Za-z_]\w*)*"
    return bool(re.fullmatch(rf"split:{axes}|(?:{axes}|-)(?:,(?:{axes}|-))*", spec))


def layout(spec: str) -> Layout:
    """The layout that the SPEC of a `constraint` stands for, as `autopar.parallelize` takes it."""
    from jax.sharding import PartitionSpec

    from autopar import Replicated, Split

    if spec == "replicated":
        return Replicated()
    if spec == "split" or spec.startswith("split:"):
        return Split(tuple(spec.removeprefix("split:").split("+")) if ":" in spec else None)
    entries = (None if entry == "-" else tuple(entry.split("+")) for entry in spec.split(","))
    return PartitionSpec(*(entry[0] if entry and len(entry) == 1 else entry for entry in entries))


def published_size(model: str) -> Callable[[str], Sizes]:
    """Make a reader for the name of a model's published size, such as 39B."""

    def read(text: str) -> Sizes:
        from autopar.models.published_sizes import find_size

        try:
            return find_size(model, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def size_reader(kind: type) -> Callable[[str], int | float | str]:
    """Make a reader for a model's size that is an int, a float or a word."""

    def read(text: str) -> int | float | str:
        try:
            value: int | float | str = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        return value

    return read
