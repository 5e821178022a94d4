"""The description in a checkpoint, beside the state: the plan, the step, its leaves, and the progress of the run.

In: an `About`. Out: JSON with a digest of its content, and back. What can go wrong: the file is damaged, or another version of
autopar wrote it; CheckpointError says which.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TypeAlias

from autopar.errors import CheckpointError
from autopar.files.checked import Fields

VERSION = 1
Position: TypeAlias = Fields
"""The position of a source of batches, as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """One array of the state as it was saved: its path in the state, shape, type, and whether the type is weak.

    `keys` are those along the path where one of them contains a slash, so that the path does not tell them; else it is empty.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    key_kind: str | None = None
    keys: tuple[str, ...] = ()

    @property
    def name(self) -> tuple[str, ...]:
        """The keys along its path."""
        return self.keys or tuple(self.path.split("/"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """The description of a checkpoint.

    Attributes:
        step: the name of the step.
        fingerprint: the fingerprint of its program.
        plan: its plan, as `to_json` wrote it.
        wishes: a digest of what was asked of the plan; empty if it is not known.
        leaves: the arrays of the state.
        number: the number of steps made; None if it was not given.
        position: the position of the source of batches; None without a source.
        notes: further JSON of the caller.
    """

    step: str
    fingerprint: str
    plan: str
    leaves: tuple[SavedLeaf, ...]
    number: int | None = None
    position: Position | None = None
    notes: Fields = dataclasses.field(default_factory=dict)
    wishes: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the description as a JSON value."""
        content = dataclasses.asdict(self)
        return {"version": VERSION, "digest": _digest(content), "content": content}

    @classmethod
    def from_json(cls, value: Fields, where: object) -> About:
        """Read a description. Raises CheckpointError if it is damaged or foreign; `where` names the checkpoint."""
        try:
            if value["version"] != VERSION:
                raise CheckpointError(
                    f"{where} has version {value['version']} of autopar's checkpoints, this is autopar with version {VERSION}: "
                    "restore it with the autopar that wrote it"
                )
            content = value["content"]
            if value["digest"] != _digest(content):
                raise CheckpointError(f"{where} is damaged: its description does not have the digest that it says")
            leaves = tuple(
                SavedLeaf(**{**leaf, "shape": tuple(leaf["shape"]), "keys": tuple(leaf.get("keys", ()))})
                for leaf in content["leaves"]
            )
            return cls(**{**content, "leaves": leaves})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where} is no checkpoint of autopar, or is damaged: its description lacks {error}"
            ) from error


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
