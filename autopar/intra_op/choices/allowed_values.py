"""The layouts that the values of a step may have on a mesh: its inputs, its results, and values inside of it.

In: a traced step, a mesh, the user's constraints. Out: for each value the allowed layouts. The constraints speak of one
microbatch; slices in time are whole over devices. What can go wrong: ConstraintError lists what cannot be met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.avals import is_opaque
from autopar.compat import source_line
from autopar.errors import ConstraintError
from autopar.layouts.allowed import allowed_layouts
from autopar.layouts.constraints import Constraints
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.layouts.moves import all_layouts
from autopar.program.checkpoint_names import named_values
from autopar.program.opened.constrain import find_asked
from autopar.program.program import Equation, Program
from autopar.program.step import Leaf, TracedStep

Allowed = tuple[Layout, ...]


def allowed_inputs(traced: TracedStep, mesh: LogicalMesh, constraints: Constraints) -> list[Allowed | None]:
    """The layouts of each input, None where all are allowed. Raises ConstraintError, also for rules that match nothing."""
    leaves = [leaf.one for leaf in traced.inputs]
    if constraints.on_results.rules:
        leaves += [leaf.one for leaf in traced.outputs]
        leaves += [leaf for _, leaf in named_values(traced.program)]
    allowed = allowed_layouts(leaves, mesh, constraints, shared=traced.shared)
    return [_stacked(leaf, la, mesh) for leaf, la in zip(traced.inputs, allowed, strict=False)]


def allowed_outputs(traced: TracedStep, mesh: LogicalMesh, constraints: Constraints) -> list[Allowed | int | None]:
    """The layouts of each output; state stays in the place of an input, whose number that is. Raises ConstraintError."""
    allowed = allowed_layouts([leaf.one for leaf in traced.outputs], mesh, constraints.on_results)
    return [
        _stacked(leaf, la, mesh) if number is None else _in_place(number, la, leaf, traced)
        for leaf, la, number in zip(traced.outputs, allowed, traced.state_of_output, strict=True)
    ]


def _in_place(number: int, allowed: Allowed | None, leaf: Leaf, traced: TracedStep) -> int:
    if allowed is not None:
        path = traced.inputs[number].path
        raise ConstraintError(
            f"the constraint on {leaf.path} is one on the new {path}, which lies like the old one: constrain {path!r}"
        )
    return number


def _stacked(leaf: Leaf, allowed: Allowed | None, mesh: LogicalMesh) -> Allowed | None:
    """The layouts of a leaf that may be a stack over microbatches, along which it is whole; random keys are whole anyway."""
    if is_opaque(leaf.aval):
        return (Layout.replicated(len(leaf.shape)),)
    if leaf.microbatches == 1:
        return allowed
    plain = (la for la in all_layouts(leaf.one.shape, mesh, ()) if la.is_ascending)
    return tuple(layout.prepend() for layout in (plain if allowed is None else allowed))


def layouts_asked(
    traced: TracedStep, mesh: LogicalMesh, constraints: Constraints
) -> Mapping[Equation, Sequence[Layout]]:
    """The layouts that results of equations must have: where the step asks, and of named values. Raises ConstraintError."""
    asked: dict[Equation, Sequence[Layout]] = dict(asked_layouts(traced.program, mesh))
    if constraints.on_results.rules:
        named = list(named_values(traced.program))
        allowed = allowed_layouts([leaf for _, leaf in named], mesh, constraints.on_results)
        asked |= {eqn: la for (eqn, _), la in zip(named, allowed, strict=True) if la is not None}
    return asked


def fitting_meshes(traced: TracedStep, meshes: Sequence[LogicalMesh]) -> tuple[LogicalMesh, ...]:
    """The meshes that have the axes that the step asks for. Raises ConstraintError if none has them."""
    fitting, errors = [], []
    for mesh in meshes:
        try:
            asked_layouts(traced.program, mesh)
        except ConstraintError as error:
            errors.append(error)
        else:
            fitting.append(mesh)
    if meshes and not fitting:
        raise errors[0]
    return tuple(fitting)


def asked_layouts(program: Program, mesh: LogicalMesh) -> Mapping[Equation, tuple[Layout, ...]]:
    """The layouts in which the results of equations may be, of those that ask. Raises ConstraintError.

    Random keys are whole on every device whatever is asked, as their words cannot be split.
    """
    return {
        eqn: asked.layouts(eqn.outvars[0].aval.shape, mesh, source=source_line(eqn))
        for eqn, asked in find_asked(program.walk())
        if not is_opaque(eqn.outvars[0].aval)
    }


def asks_for_layouts(program: Program) -> bool:
    """Whether the step itself asks for any."""
    return any(True for _ in find_asked(program.walk()))
