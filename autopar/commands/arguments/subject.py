"""The subject of a command: a train step with the shapes of its arguments, found by name, and its training data.

MODEL is a name in the registry, at the sizes that flags give, or `module:function`, which `own_step` calls. Shapes are all that
planning needs: it touches no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import jax

from autopar.commands.arguments.own_step import OwnStep, PyTree, import_step
from autopar.commands.arguments.values import model_entry
from autopar.errors import ArgumentError
from autopar.models import BuiltModel, build

Sizes: TypeAlias = Mapping[str, int | float | str]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A step and the shapes of its state and batch."""

    step: Callable[..., object]
    state: PyTree
    batch: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee:
    """A step with its first state and its batches.

    Attributes:
        subject: The step, and shapes.
        create_state: Makes the first state, `create_state(*args)`.
        args: Its arguments.
        batches: Begins the batches; the same ones each time.
        tokens_per_batch: How many there are, if the step is fed with text; other batches are counted in examples.
    """

    subject: Subject
    create_state: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    batches: Callable[[], Iterable[PyTree]]
    tokens_per_batch: int | None = None

    @property
    def examples_per_batch(self) -> int:
        """The length of the batch's longest first dimension."""
        return max((leaf.shape[0] for leaf in jax.tree.leaves(self.subject.batch) if leaf.shape), default=1)


def build_model(model: str, sizes: Sizes) -> BuiltModel:
    """Build a model of the registry; ArgumentError says which sizes cannot work."""
    model_entry(model)
    try:
        return build(model, **sizes)
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def find_shapes(built: BuiltModel) -> Subject:
    """The step of a model with the shapes of its state, evaluated without a device, and of its batch."""
    state = jax.eval_shape(lambda: built.create_state(jax.random.key(0)))
    return Subject(built.train_step, state, built.batch_shape())


def find_subject(model: str, sizes: Sizes) -> Subject:
    """Find the step that MODEL names."""
    return _shapes_of(import_step(model)) if ":" in model else find_shapes(build_model(model, sizes))


def find_trainee(model: str, sizes: Sizes, seed: int) -> Trainee:
    """Find the step that MODEL names, and what to train it with; a seed is for models of the registry.

    Raises ArgumentError if a step of the user's own comes with shapes alone.
    """
    if ":" in model:
        own = import_step(model)
        create_state, args = own.first_state()
        return Trainee(subject=_shapes_of(own), create_state=create_state, args=args, batches=own.batches())
    built = build_model(model, sizes)
    return Trainee(
        subject=find_shapes(built),
        create_state=built.create_state,
        args=(jax.random.key(seed),),
        batches=lambda: built.data(seed),
        tokens_per_batch=built.tokens_per_batch if built.tokens_per_batch > built.config.batch else None,
    )


def _shapes_of(own: OwnStep) -> Subject:
    return Subject(own.step, own.state_shapes(), own.batch_shapes())
