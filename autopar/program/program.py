"""A traced step as a `Program`: flat equations, calls inlined, loops as nested programs.

In: a ClosedJaxpr. Out: a `Program` that computes the same outputs and is in the form the planner and the lowering share:

    - calls (jit, custom derivatives, recomputation, a branch per platform) are inlined; recomputation keeps its barrier, so
      that it is not merged with the forward pass, and waits for the cotangents (`Equation.after`), so that it is not done early;
    - scan, while and cond are equations with nested programs (`regions`); what a nested program closes over is an operand;
    - a value with several users passes through one `fan_out` equation: the place where it may change layout once for all;
    - every input of a nested program has exactly one user, a `fan_out`, and every output has a producer of its own.

Values are JAX's Vars and Literals. What can go wrong: a side effect in the program, refused with the user's line.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from autopar.compat import Literal, Var
from autopar.program.task_name import TaskName

fan_out_p = Primitive("fan_out")
fan_out_p.def_impl(lambda x: x)
fan_out_p.def_abstract_eval(lambda x: x)

Atom: TypeAlias = Var | Literal


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Inputs, equations in order, outputs."""

    invars: tuple[Var, ...]
    equations: tuple[Equation, ...]
    outvars: tuple[Atom, ...]

    def walk(self) -> Iterator[Equation]:
        """Every equation, nested ones after the one that holds them."""
        for eqn in self.equations:
            yield eqn
            for region in eqn.regions:
                yield from region.walk()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Equation:
    """One operation; quacks like a JaxprEqn. Control flow is a `loops.LoopEquation`, which has nested programs (`regions`).

    `tag`: what the pass that traced the operation says of it, see `tags.py`. `after`: a value that the operation does not read,
    and that is there before its results are.
    """

    primitive: Primitive
    invars: tuple[Atom, ...]
    outvars: tuple[Var, ...]
    params: dict[str, Any]
    source_info: Any
    regions: tuple[Program, ...] = ()
    tag: Tag | None = None
    after: Var | None = None

    @property
    def task(self) -> TaskName | None:
        """The task of a pipeline stage that the operation belongs to."""
        return self.tag if isinstance(self.tag, TaskName) else None


Tag: TypeAlias = TaskName | Equation
"""The task that an operation belongs to, or the operation of another program of which it does a part, or all."""


def can_be_awaited(v: Var) -> bool:
    """Whether it has elements, and they are real numbers."""
    return 0 not in v.aval.shape and _is_real(v.aval.dtype)


@functools.cache
def _is_real(dtype: np.dtype) -> bool:
    """Whether elements are real numbers; asked of a handful of types, thousands of times."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def variables_of(atoms: Sequence[Atom]) -> list[Var]:
    """Those that are no literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def operands_of(eqn: Equation) -> list[Var]:
    """The operands that are not literals."""
    return variables_of(eqn.invars)


CAST = "convert_element_type"


def hands_on(eqn: Equation) -> bool:
    """Whether an operation hands on what it takes, in another number format maybe."""
    return eqn.primitive is fan_out_p or eqn.primitive.name == CAST


def divides(eqn: Equation) -> bool:
    """Whether its result is the quotient of its operands."""
    return eqn.primitive.name == "div"


def subtracts(eqn: Equation) -> bool:
    """Whether its result is the difference of its operands."""
    return eqn.primitive.name == "sub"
