"""One checkpoint: a folder with a state and its description, complete or absent.

In: a state on any devices, and the step that made it; or a folder, and the step that is to go on. Out: the folder, written in the
background by orbax while steps run on, each process its own part; or the state where the step's plan wants it, whatever the plan
was under which it was saved. What can go wrong: the disk is full, a file is damaged, the state is another one; each error names
the folder, and the leaf where it is about one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp

from autopar.checkpoints import freed
from autopar.checkpoints.about import About, Position, SavedLeaf
from autopar.checkpoints.leaves import (
    Name,
    arrays_by_name,
    describe_leaf,
    nested,
    path_of,
    places_by_name,
    refuse_other_checkpoint,
    refuse_other_state,
)
from autopar.checkpoints.orbax_leaf import LeafRestoreArgs, registry_of
from autopar.checkpoints.parts import Saved
from autopar.compat import undisturbed
from autopar.errors import AutoparError, CheckpointError, warn
from autopar.events import reach
from autopar.execution.calls import refuse_consumed
from autopar.execution.published import PlacedLeaf, Places
from autopar.execution.turns import RUNNING
from autopar.files.checked import Fields
from autopar.plan_cache.offered import Offer
from autopar.program.call import PyTree
from autopar.runtime.meetings import group_of, refusing_together
from autopar.runtime.processes import as_weak
from autopar.split_array import SplitArray

TIMEOUT_S = 1200
"""Seconds that the processes wait for each other while a checkpoint is written."""
UNFINISHED = ".orbax-checkpoint-tmp"
"""The mark of orbax on the folder of a checkpoint that is being written, or whose process ended meanwhile."""


class Positioned(Protocol):
    """A source of batches with a position, such as the result of `autopar.data.sharded`."""

    def position(self) -> Position:
        """Return the position as JSON."""

    def seek(self, position: Position) -> None:
        """Continue from a position."""


class StepWithPlan(Protocol):
    """The part of a planned `autopar.ParallelStep` that checkpoints need."""

    def plan(self, *args: PyTree) -> object:
        """Plan the step for these arguments."""

    def places(self) -> Places:
        """Return the places of the step's arrays under its last plan."""

    def jax_devices(self) -> list[jax.Device]:
        """Return the devices that the step may run on."""


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, processes: tuple[int, ...]) -> None:
        self.path, self._processes = path, processes

    def wait(self) -> Path:
        """Wait until the checkpoint is complete.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it could not be written; there is no folder then.
        """
        with _in_our_words(self.path, "written"):
            checkpointer_of(self._processes).wait_until_finished()
        return self.path


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    step: StepWithPlan,
    *,
    data: Positioned | None = None,
    number: int | None = None,
    notes: Fields | None = None,
) -> Saving:
    """Write a state in the background. The step may take the state's memory as soon as this returns.

    Every process that has devices of the step calls this, and writes the shards that its devices hold. All processes use one
    folder; on several machines it is on a disk that they share. Checkpoints are written one at a time: a save waits for the one
    before.

    Args:
        path: the folder of the checkpoint, which must not exist. It appears when the checkpoint is complete.
        state: the state as the step returns it, a tree of arrays; a tuple of trees if several arguments are state.
        step: the step, planned before. Its plan and the fingerprint of its program are saved beside the state.
        data: a source of batches, made by `autopar.data.sharded`, whose position is saved as well.
        number: the number of steps made so far.
        notes: further JSON to save.

    Returns:
        A `Saving`, whose `wait()` returns once the checkpoint is complete.

    Raises:
        ArgumentError: the state is not that of the step, or some of its arrays no longer exist.
        CheckpointError: there is a checkpoint at the path already, or it cannot be written; also if the save before failed.
    """
    where = Path(path).expanduser().absolute()
    group, processes = group_of(step.jax_devices), _processes_of(step)
    with undisturbed():
        with refusing_together(group):
            places = step.places()
            arrays = _checked(state, places)
            _refuse_existing(where)
            position = None if data is None else data.position()
            about = _describe(places, arrays, number=number, position=position, notes=notes or {})
        if group is not None:
            group.meet(f"saves {len(arrays)} arrays of {places.name} to {where}")
        with RUNNING.take(places.name), _in_our_words(where, "written"):
            freed.SAVED.add(sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays.values()))
            checkpointer_of(processes).save(
                where,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(nested(arrays)), about=ocp.args.JsonSave(about.to_json())
                ),
            )
    return Saving(where, processes)


def restore(path: str | os.PathLike[str], step: StepWithPlan, *, data: Positioned | None = None) -> Any:
    """Read a state where the plan of a step wants it. Plan, devices, stages and processes may be others than when it was saved.

    Each device reads the entries that it needs, and no process holds more than its part. Every process that has devices of the
    step calls this.

    Args:
        path: the folder of a checkpoint, or a folder with numbered checkpoints, of which the last complete one is read.
        step: the step, planned before, for example by `step.plan(shapes, batch)`.
        data: a source of batches, made by `autopar.data.sharded`, which continues from the saved position; where none was saved,
            behind as many batches as steps were made.

    Returns:
        The state, bit for bit as it was saved.

    Raises:
        ArgumentError: the step has not been planned, or has no state.
        CheckpointError: there is no complete checkpoint, it is damaged, or it holds another state; leaves are named by path. Or
            `data` is given, and neither a position nor the number of steps was saved.
    """
    where = Path(path).expanduser().absolute()
    wait_for_saves(step)
    where = newest(where)
    state, about = read(where, step)
    if data is not None:
        data.seek(position_after(about, where))
    return state


def position_after(about: About, where: Path) -> Position:
    """Return the position of the batches behind a checkpoint: the saved one, or one batch for each step that was made.

    Raises CheckpointError if the checkpoint has neither, and its folder is not named by a number either.
    """
    if about.position is not None:
        return about.position
    number = int(where.name) if about.number is None and where.name.isdecimal() else about.number
    if number is None:
        raise CheckpointError(
            f"{where} has no position of the batches and no number of steps, so data= does not know where to go on: save with "
            "data= or number=. For this one restore without data=, and say how many batches were taken, "
            'data.seek({"batches": 100, "state": None})'
        )
    return {"batches": number, "state": None}


def read(where: Path, step: StepWithPlan) -> tuple[PyTree, About]:
    """Return the state of a checkpoint where the step wants it, and the description of the checkpoint. Raises as `restore`."""
    group, processes = group_of(step.jax_devices), _processes_of(step)
    places = step.places()
    tree = places.state
    with undisturbed():
        with refusing_together(group):
            about = read_about(where)
            wanted = places_by_name(tree)
            refuse_other_checkpoint(about.leaves, wanted, places.name, where)
        if group is not None:
            group.meet(f"restores {len(wanted)} arrays of {places.name} from {where}")
        arrays = _read_arrays(where, wanted, {leaf.name: leaf for leaf in about.leaves}, processes)
    return jax.tree.unflatten(jax.tree.structure(tree), _in_order(tree, arrays)), about


def _read_arrays(
    where: Path, wanted: Mapping[Name, PlacedLeaf], saved: Mapping[Name, SavedLeaf], processes: tuple[int, ...]
) -> dict[Name, Saved]:
    args = {
        name: LeafRestoreArgs(
            restore_type=jax.Array,
            path=path_of(name),
            shape=leaf.shape,
            type=leaf.dtype,
            sharding=leaf.sharding,
            key_kind=saved[name].key_kind,
        )
        for name, leaf in wanted.items()
    }
    with _in_our_words(where, "restored"):
        reach("read", where)
        found = checkpointer_of(processes).restore(
            where,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(item=nested(dict.fromkeys(wanted, 0)), restore_args=nested(args))
            ),
        )
    arrays = arrays_by_name(found.state)
    return {name: _as_saved(arrays[name], saved[name]) for name in wanted}


def _as_saved(array: Saved, leaf: SavedLeaf) -> Saved:
    """Give an array the weak type that it had when it was saved, because a step is planned for either type."""
    if not leaf.weak_type:
        return array
    if isinstance(array, SplitArray):
        return SplitArray([as_weak(piece) for piece in array.pieces], array.dim)
    return as_weak(array) if isinstance(array, jax.Array) else array


def _in_order(tree: PyTree, arrays: Mapping[Name, Saved]) -> list[Saved]:
    """Return the arrays in the order of a tree's leaves."""
    return [arrays[name] for name in places_by_name(tree)]


def wait_for_saves(step: StepWithPlan) -> None:
    """Wait until no save of this process is under way. Raises CheckpointError if the last one failed."""
    with _in_our_words("the checkpoint before", "written"):
        checkpointer_of(_processes_of(step)).wait_until_finished()


def read_about(where: Path) -> About:
    """Read the description of a checkpoint. Raises CheckpointError if the folder is no checkpoint, or is damaged."""
    try:
        found = ocp.Checkpointer(ocp.CompositeCheckpointHandler(about=ocp.JsonCheckpointHandler())).restore(
            where, args=ocp.args.Composite(about=ocp.args.JsonRestore())
        )
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(
            f"{where} is no complete checkpoint of autopar: {_first_line(error)}. Restore another one of its folder."
        ) from error
    return About.from_json(found.about, where)


def offer_of(folder: Path) -> Offer | None:
    """Return the plan of the last complete checkpoint in a folder, for a step to be planned; None if there is none."""
    numbers = complete_numbers(folder)
    if not numbers:
        return None
    where = folder / str(numbers[-1])
    try:
        about = read_about(where)
    except CheckpointError:  # the restore of the state reports it
        return None
    return Offer(about.plan, about.wishes, f"the checkpoint {where}")


def newest(where: Path) -> Path:
    """Find the checkpoint at a path: the path itself, or the largest number in it. Raises CheckpointError if there is none."""
    if is_complete(where):
        return where
    numbers = complete_numbers(where)
    if numbers:
        return where / str(numbers[-1])
    unfinished = [one.name for one in where.glob(f"*{UNFINISHED}*")] if where.is_dir() else []
    left = (
        f"; {len(unfinished)} that were not finished ({unfinished[0]}) hold nothing to go on from" if unfinished else ""
    )
    raise CheckpointError(f"there is no complete checkpoint at {where}{left}. Name the folder that was given to save.")


def is_complete(where: Path) -> bool:
    """Whether a folder is a complete checkpoint. Orbax renames the folder to this name when it is complete."""
    return UNFINISHED not in where.name and (where / "about").is_dir() and (where / "state").is_dir()


def complete_numbers(folder: Path) -> list[int]:
    """Return the numbers of the complete checkpoints in a folder in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(int(one.name) for one in folder.iterdir() if one.name.isdecimal() and is_complete(one))


def _checked(state: PyTree, places: Places) -> dict[Name, Saved]:
    """Return the arrays of a state. Raises ArgumentError if they are not those of the step, or no longer exist."""
    arrays = arrays_by_name(state)
    refuse_consumed(places.name, map(path_of, arrays), list(arrays.values()))
    refuse_other_state(arrays, places_by_name(places.state), places.name)
    return arrays


def _refuse_existing(where: Path) -> None:
    if where.exists():
        raise CheckpointError(
            f"{where} is there already, and a checkpoint never takes the place of another one: name a new folder, such as "
            f"{where.parent / 'NUMBER_OF_STEPS'}, or remove that one"
        )


def _describe(
    places: Places, arrays: Mapping[Name, Saved], *, number: int | None, position: Position | None, notes: Fields
) -> About:
    plan = places.plan
    leaves = tuple(describe_leaf(name, array) for name, array in arrays.items())
    return About(
        step=places.name,
        fingerprint=plan.fingerprint,
        plan=plan.to_json(),
        wishes=places.wishes,
        leaves=leaves,
        number=number,
        position=position,
        notes=notes,
    )


def _processes_of(step: StepWithPlan) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in step.jax_devices()}))


@functools.cache
def checkpointer_of(processes: tuple[int, ...]) -> ocp.AsyncCheckpointer:
    """Make the orbax checkpointer of these processes. The first of them creates and renames folders."""
    is_writer = jax.process_index() == processes[0]
    among = ocp.options.MultiprocessingOptions(
        primary_host=processes[0],
        active_processes={*processes},
        barrier_sync_key_prefix="autopar-" + "-".join(map(str, processes)),
    )
    state = ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        use_compression=False,
        multiprocessing_options=among,
        type_handler_registry=registry_of(is_writer=is_writer),
    )
    about = ocp.JsonCheckpointHandler(multiprocessing_options=among)
    made = ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            state=state, about=about, composite_options=ocp.CompositeOptions(multiprocessing_options=among)
        ),
        # Folders that are made in the background and fail leave threads that wait for them, and keep the program from ending.
        async_options=ocp.AsyncOptions(timeout_secs=TIMEOUT_S, create_directories_asynchronously=False),
        multiprocessing_options=among,
    )
    atexit.register(_finish, made)
    return made


def _finish(checkpointer: ocp.AsyncCheckpointer) -> None:
    """Wait for the last save of a program that ends without waiting, and report a failure."""
    try:
        checkpointer.wait_until_finished()
    except Exception as error:  # noqa: BLE001 - the program ends, and the user has to see the error
        warn(f"the last checkpoint was not written: {_first_line(error)}")


@contextlib.contextmanager
def _in_our_words(where: object, done: str) -> Iterator[None]:
    """Open a context that raises failures of orbax as a CheckpointError."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where} cannot be {done}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
