"""The arguments of `parallelize`, checked one by one.

In: what a user wrote. Out: the same in the one form that `Settings` holds. What can go wrong: an argument is something else; the
error names the argument, what was given and what it may be. What two arguments mean together is for `decide.py`.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

import jax
import numpy as np

from autopar.cost_model.hardware import Cluster, find_cluster, load_cluster
from autopar.errors import ArgumentError
from autopar.layouts.mesh import LogicalMesh, whole_number
from autopar.layouts.moves import KINDS
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.schedules.schedules import SCHEDULES, Open, Recompute

Shape = Sequence[int] | Mapping[str, int]
Statistics = Literal["batch", "microbatch"]
MeshShape = Literal["auto"] | Shape | Sequence[Shape]


@runtime_checkable
class Leader(Protocol):
    """A step whose mesh and layouts another one follows."""

    def last_plan(self) -> Plan | PipelinePlan:
        """The plan that was made last; PlanError if there is none."""

    def jax_devices(self) -> list[jax.Device]:
        """The devices that it runs on."""

    def cluster(self) -> Cluster:
        """What the planner assumes of the machine."""


def check_devices(devices: object) -> tuple[jax.Device, ...] | int | None:
    """The devices, or their number."""
    if devices is None:
        return None
    number = whole_number(devices)
    if number is not None:
        if number < 1:
            raise ArgumentError(f"devices={number}: at least one device is needed")
        return number
    listed = tuple(devices) if isinstance(devices, Sequence | np.ndarray) and not isinstance(devices, str) else ()
    if not listed and isinstance(devices, list | tuple):
        raise ArgumentError(f"devices={devices!r}: at least one device is needed")
    if not listed or not all(isinstance(device, jax.Device) for device in listed):
        raise ArgumentError(
            f"devices={devices!r}: a list of JAX devices such as jax.devices(), or their number, is expected"
        )
    if len(set(listed)) < len(listed):
        raise ArgumentError(f"devices={devices!r}: every device is expected once")
    return listed


def check_cluster(cluster: object) -> Literal["auto"] | Cluster:
    """A cluster by name, file or value; the error names the known ones."""
    if isinstance(cluster, str) and cluster == "auto":
        return "auto"
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | os.PathLike):
        raise ArgumentError(
            f"cluster={cluster!r}: 'auto', the name of a preset or a Cluster is expected, or the path of a file"
        )
    try:
        return find_cluster(cluster) if isinstance(cluster, str) else load_cluster(Path(cluster))
    except ValueError as error:
        raise ArgumentError(f"cluster={cluster!r}: {error}") from None


def check_count(name: str, count: object) -> Open:
    """A number of microbatches, stages or virtual stages, or 'auto'."""
    if isinstance(count, str) and count == "auto":
        return "auto"
    number = whole_number(count)
    if number is None or number < 1:
        raise ArgumentError(f"{name}={count!r}: 'auto' or a positive whole number is expected")
    return number


def check_limit(name: str, count: object) -> int | None:
    """How many of something are kept, or None for all."""
    number = whole_number(count)
    if count is not None and (number is None or number < 1):
        raise ArgumentError(f"{name}={count!r}: a positive whole number is expected, or None for no limit")
    return number


def check_processes(count: object) -> int:
    """The number of processes that plan."""
    number = whole_number(count)
    if number is None or number < 1:
        raise ArgumentError(f"planning_processes={count!r}: a positive whole number is expected")
    return number


def check_seconds(seconds: object) -> float | None:
    """How long planning may take, or None."""
    if seconds is None:
        return None
    number = math.nan if isinstance(seconds, bool | np.bool_) or not isinstance(seconds, Real) else float(seconds)
    if not 0 < number < math.inf:
        raise ArgumentError(
            f"planning_seconds={seconds!r}: a positive number of seconds is expected, such as 60, or None for no limit"
        )
    return number


def check_switch(name: str, given: object) -> bool:
    """True or False."""
    if not isinstance(given, bool | np.bool_):
        raise ArgumentError(f"{name}={given!r}: True or False is expected")
    return bool(given)


def check_kinds(collectives: object) -> frozenset[str]:
    """The kinds of collectives that may be used."""
    given = KINDS if collectives is None else (collectives,) if isinstance(collectives, str) else collectives
    if not isinstance(given, Iterable) or not all(isinstance(kind, str) for kind in given):
        raise ArgumentError(
            f"collectives={given!r}: None, for all, or a list of kinds is expected, of {', '.join(KINDS)}"
        )
    unknown = sorted(set(given) - set(KINDS))
    if unknown:
        raise ArgumentError(f"collectives={unknown}: no such kind; there are {', '.join(KINDS)}")
    return frozenset(given)


def check_positions(what: str, given: object) -> tuple[int, ...]:
    """Positions of arguments, as a tuple; one number stands for itself alone."""
    one = whole_number(given)
    listed = tuple(given) if isinstance(given, Iterable) and one is None and not isinstance(given, str) else (given,)
    positions = tuple(number for number in map(whole_number, listed) if number is not None)
    if len(positions) < len(listed):
        raise ArgumentError(
            f"{what}={given!r}: a number, or a list of numbers, of positional arguments is expected; () stands for none"
        )
    return positions


def check_names(what: str, given: object) -> tuple[str, ...]:
    """Names of arguments, as a tuple; one name stands for itself alone."""
    listed = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    names = tuple(name for name in listed if isinstance(name, str))
    if len(names) < len(listed):
        raise ArgumentError(
            f"{what}={given!r}: a name, or a list of names, of arguments is expected; () stands for none"
        )
    return names


def check_open_positions(what: str, given: object) -> Literal["auto"] | tuple[int, ...]:
    """Positions of arguments, or 'auto'."""
    if isinstance(given, str) and given == "auto":
        return "auto"
    return check_positions(what, given)


def check_memory_limit(limit: object) -> int | None:
    """Bytes per device, or None."""
    if limit is None:
        return None
    number = math.nan if isinstance(limit, bool) or not isinstance(limit, Real) else float(limit)
    if not 1 <= number < math.inf:
        raise ArgumentError(
            f"memory_limit_bytes={limit!r}: a positive number of bytes per device is expected, such as 16e9, or None for the "
            "memory of the cluster's devices"
        )
    return int(number)


def check_plan(plan: object) -> Plan | PipelinePlan | None:
    """A plan, or None."""
    if plan is not None and not isinstance(plan, Plan | PipelinePlan):
        raise ArgumentError(
            f"plan={plan!r} is of type {type(plan).__name__}: a plan is expected; "
            "autopar.plan_from_json(pathlib.Path(FILE).read_text()) reads one from a file"
        )
    return plan


def check_leader(follow: object) -> Leader | None:
    """A step that has a plan, or None."""
    if follow is not None and not isinstance(follow, Leader):
        raise ArgumentError(
            f"follow={follow!r} is of type {type(follow).__name__}: a step that `parallelize` returned is expected, not the "
            "function that it was made of"
        )
    return follow


def check_meshes(shape: object) -> Literal["auto"] | tuple[LogicalMesh, ...]:
    """One mesh, or one per stage."""
    if isinstance(shape, str):
        if shape != "auto":
            raise ArgumentError(f"mesh_shape={shape!r}: 'auto', sizes, or a list of sizes, one per stage, is expected")
        return "auto"
    if not isinstance(shape, Mapping | tuple | list):
        raise ArgumentError(
            f"mesh_shape={shape!r}: the size of each axis is expected, such as (8,), (2, 4) or {{'data': 2, 'model': 4}}"
        )
    several = isinstance(shape, tuple | list) and len(shape) > 0 and not isinstance(shape[0], int | np.integer)
    if several and all(isinstance(one, Mapping | tuple | list) for one in shape):
        return tuple(LogicalMesh.of(one) for one in shape)
    return (LogicalMesh.of(shape),)


def check_schedule(schedule: object) -> str:
    """A schedule's name or 'auto'."""
    if schedule != "auto" and schedule not in SCHEDULES:
        close = difflib.get_close_matches(str(schedule), SCHEDULES, n=1, cutoff=0.5)
        nearest = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(f"schedule={schedule!r}: 'auto' or one of {', '.join(SCHEDULES)} is expected{nearest}")
    return str(schedule)


def check_statistics(batch_statistics: object) -> Statistics:
    """Whose statistics batch normalisation takes."""
    known: tuple[Statistics, ...] = get_args(Statistics)
    for one in known:
        if batch_statistics == one:
            return one
    raise ArgumentError(f"batch_statistics={batch_statistics!r}: one of {', '.join(map(repr, known))} is expected")


def check_recompute(recompute: object) -> Recompute:
    """Which forward work is done again in backward."""
    known: tuple[Recompute, ...] = get_args(Recompute)
    for one in known:
        if recompute == one:
            return one
    raise ArgumentError(f"recompute={recompute!r}: one of {', '.join(map(repr, known))} is expected")
