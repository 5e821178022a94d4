"""A folder of numbered checkpoints, of which the last few are kept.

In: a folder and a step. Out: `Checkpoints`, which saves and restores by number. What can go wrong: two jobs write to one folder;
the second one finds it locked, or without `alone` a number taken, and says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from autopar.arguments import check_limit
from autopar.checkpoints.about import About
from autopar.checkpoints.lock import locked
from autopar.checkpoints.save import (
    UNFINISHED,
    Positioned,
    Saving,
    StepWithPlan,
    complete_numbers,
    newest,
    offer_of,
    position_after,
    read,
    save,
    wait_for_saves,
)
from autopar.files.checked import Fields
from autopar.plan_cache.offered import offering
from autopar.program.call import PyTree
from autopar.runtime.meetings import group_of, refusing_together

_LEAVING = ".removed"
"""The end of a checkpoint's name while its files are removed."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored state, and the description of its checkpoint; `about.number` is the number of steps made."""

    state: PyTree
    about: About


class Checkpoints:
    """The checkpoints of one run in one folder: `FOLDER/100`, `FOLDER/200`, ...

    Every process makes the same calls.
    """

    def __init__(self, folder: str | os.PathLike[str], step: StepWithPlan, *, keep: int | None = 3) -> None:
        """Open a folder of checkpoints. The first save creates it.

        Args:
            folder: the folder.
            step: the step whose state the checkpoints hold.
            keep: the number of complete checkpoints to keep; the oldest are removed first. None keeps all.

        Raises:
            ArgumentError: `keep` is no positive number.
        """
        self.folder, self.step, self.keep = Path(folder).expanduser().absolute(), step, check_limit("keep", keep)
        self._last: Saving | None = None

    def numbers(self) -> list[int]:
        """Return the numbers of the complete checkpoints in ascending order."""
        return complete_numbers(self.folder)

    def plan(self, *args: PyTree) -> None:
        """Plan the step: take the plan of the last checkpoint if the same was asked of it, and search otherwise."""
        with offering(offer_of(self.folder)):
            self.step.plan(*args)

    def save(
        self, number: int, state: PyTree, *, data: Positioned | None = None, notes: Fields | None = None
    ) -> Saving:
        """Write the state after `number` steps in the background; see `autopar.save`."""
        self.wait()
        self._last = save(self.folder / str(number), state, self.step, data=data, number=number, notes=notes)
        return self._last

    def restore(self, number: int | None = None, *, data: Positioned | None = None) -> Restored:
        """Read a checkpoint, the last complete one if no number is given; see `autopar.restore`."""
        self.wait()
        where = newest(self.folder) if number is None else self.folder / str(number)
        state, about = read(where, self.step)
        if data is not None:
            data.seek(position_after(about, where))
        return Restored(state, about)

    def wait(self) -> None:
        """Wait until the save of this process that is under way is complete, and remove what is not kept.

        Raises CheckpointError if the save failed.
        """
        wait_for_saves(self.step)
        if self._last is not None:
            self._last = None
            self._remove_old()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Open a context in which no other run uses the folder. Raises CheckpointError in every process if one uses it."""
        group = group_of(self.step.jax_devices)
        with contextlib.ExitStack() as stack:
            with refusing_together(group):
                if self._is_first():
                    stack.enter_context(locked(self.folder))
            if group is not None:
                group.meet(f"keeps checkpoints in {self.folder}")
            yield

    def clear_unfinished(self) -> None:
        """Remove unfinished checkpoints of processes that ended. No other run may be writing to the folder."""
        self.wait()
        if self._is_first() and self.folder.is_dir():
            for one in [*self.folder.glob(f"*{UNFINISHED}*"), *self.folder.glob(f"*{_LEAVING}")]:
                shutil.rmtree(one, ignore_errors=True)

    def _remove_old(self) -> None:
        """Remove the oldest checkpoints. Each is renamed first, so that no checkpoint is ever half removed."""
        if self.keep is None or not self._is_first():
            return
        for number in self.numbers()[: -self.keep]:
            leaving = self.folder / f"{number}{_LEAVING}"
            with contextlib.suppress(OSError):  # files that cannot be removed stay
                os.replace(self.folder / str(number), leaving)
                shutil.rmtree(leaving)

    def _is_first(self) -> bool:
        first: int = min(device.process_index for device in self.step.jax_devices())
        return jax.process_index() == first
