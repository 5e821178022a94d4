"""The methods by which a parallelized step shows what it compiles to, for `ParallelStep` to inherit.

In: a step and arguments. Out: a `Verification`, texts. What can go wrong: `autopar.verify` and `autopar.listing` import what
runs, so they are loaded by name.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping

from autopar.verification import Verification


class Inspected(abc.ABC):
    """A step whose compiled programs can be verified and read."""

    _first: tuple[object, ...] = ()

    def verify(self, *args: object, values: bool = False, **kwargs: object) -> Verification:
        """Compare the compiled programs for these arguments with the plan.

        Collectives by kind and mesh axes, in bytes; what stages send each other; peak memory, by XLA's own account; operations of
        products and convolutions. Print the result: what differs comes first.

        Args:
            *args: the step's arguments, arrays or `jax.ShapeDtypeStruct`s.
            values: also run the step, and compare its results with those of `jax.jit` on one device, leaf by leaf. This needs
                arrays, and one device that holds all of them. The arguments are not consumed.
            **kwargs: the step's keyword arguments.

        Returns:
            The verification. It raises nothing by itself: ask for `.ok`, or call `.check()`.

        Raises:
            ArgumentError: there are too few devices; or `values` of arguments that are shapes.
        """
        compiled, devices = self.compile(*args, **kwargs), self.jax_devices()
        run = importlib.import_module("autopar.verify.verify").verify
        found: Verification = run(compiled, devices, (*self._first, *args), kwargs, values=values)
        return found

    def hlo(self, *args: object, optimized: bool = True, **kwargs: object) -> Mapping[str, str]:
        """The texts of the compiled modules, by name; printed, they follow each other under their names.

        Args:
            *args: the step's arguments, arrays or `jax.ShapeDtypeStruct`s; without any, those that were planned or used last.
            optimized: what XLA compiled; or else what it was given, as StableHLO.
            **kwargs: the step's keyword arguments.

        Returns:
            One text under the step's name on one mesh; in stages one for each task, such as `forward 2`.
        """
        texts = importlib.import_module("autopar.listing.modules").texts_of
        found: Mapping[str, str] = texts(self.compile(*args, **kwargs), optimized=optimized)
        return found

    def program(self, *args: object, **kwargs: object) -> str:
        """The program that each device runs, as text to read.

        Module by module, each operation with the shapes that one device has, the layouts behind them, and every collective in its
        place with the mesh axes along which it goes. In stages task by task.

        Args:
            *args: the step's arguments, arrays or `jax.ShapeDtypeStruct`s; without any, those that were planned or used last.
            **kwargs: the step's keyword arguments.
        """
        return str(importlib.import_module("autopar.listing.program").text_of(self.compile(*args, **kwargs)))

    @abc.abstractmethod
    def compile(self, *args: object, **kwargs: object) -> object:
        """The compiled step for these arguments; without any, for those that were planned or used last."""

    @abc.abstractmethod
    def jax_devices(self) -> object:
        """The devices that the step may run on."""
