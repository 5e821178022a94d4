"""What the operations of a compiled program are, by the names under which a profiler reports them.

In: the text of the program, the mesh. Out: a `ProgramOperation` for each instruction that takes time of its own. A fusion has the
products inside it. What can go wrong: instructions that run others, such as loops; they are left out, since what they run is
reported too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from autopar.hlo.census import Collective, collective_of
from autopar.hlo.contractions import flops_of
from autopar.hlo.text import Computation, Instruction, parse_module
from autopar.recording.recorded import ProgramOperation

_RUN_OTHERS = frozenset({"while", "call", "conditional", "async-start", "async-done"})
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
_CALLED_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORMATION = re.compile(r"\w*\(|\)")
"""What stands around scopes, such as `transpose(jvp(` and `))` in `transpose(jvp(block_0))`."""
_NO_SCOPE = re.compile(
    r"shard_map|while|body|cond|closed_call|branch_\d+_fun|checkpoint|remat|rematted_computation|.*->.*"
)
"""The scopes that JAX opens, and the formula of an einsum."""


def module_name(hlo_text: str) -> str:
    """The name of a module."""
    found = _MODULE.search(hlo_text)
    return found[1] if found else ""


def operations_of(hlo_text: str, mesh_shape: Sequence[int], axis_names: Sequence[str]) -> dict[str, ProgramOperation]:
    """The operations of a program that runs on all devices of a mesh, by name."""
    module = parse_module(hlo_text)
    devices = 1
    for size in mesh_shape:
        devices *= size
    found: dict[str, ProgramOperation] = {}
    for computation in module.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in _RUN_OTHERS:
                continue
            collective = collective_of(instruction, num_devices=devices)
            operation = (
                _of_compute(instruction, computation, module)
                if collective is None
                else _of_collective(instruction, collective, mesh_shape, axis_names)
            )
            found[instruction.name] = dataclasses.replace(operation, scope=_scope(instruction, module))
    return found


def _of_collective(
    instruction: Instruction, collective: Collective, mesh_shape: Sequence[int], axis_names: Sequence[str]
) -> ProgramOperation:
    axes = collective.mesh_axes(mesh_shape) or ()
    return ProgramOperation(
        name=instruction.name,
        opcode=instruction.opcode,
        collective=collective.kind,
        axes=tuple(axis_names[axis] for axis in axes),
        groups=collective.groups,
        bytes=collective.bytes,
    )


def _of_compute(
    instruction: Instruction, computation: Computation, module: Mapping[str, Computation]
) -> ProgramOperation:
    operands = (computation.instructions.get(name) for name in instruction.operands)
    return ProgramOperation(
        name=instruction.name,
        opcode=instruction.opcode,
        bytes=sum(instruction.shape.arrays()) + sum(sum(one.shape.arrays()) for one in operands if one is not None),
        flops=_flops(instruction, computation, module),
    )


def _flops(instruction: Instruction, computation: Computation, module: Mapping[str, Computation]) -> float:
    """The operations of an instruction's products, with those of what it fuses."""
    called = _CALLED.search(instruction.attributes)
    inner = module.get(called[1]) if called else None
    if inner is None:
        return flops_of(instruction, computation, module) or 0.0
    return sum(_flops(one, inner, module) for one in inner.instructions.values())


def _scope(instruction: Instruction, module: Mapping[str, Computation]) -> str:
    """The names that a user gave: those of the instruction, or else of what it fuses, of products first, or else the last."""
    found = _OP_NAME.search(instruction.attributes)
    own = scope_of(found[1]) if found else ""
    called = _CALLED.search(instruction.attributes)
    inner = module.get(called[1]) if called else None
    if own or inner is None:
        return own
    scopes = [(_flops(one, inner, module) > 0, _scope(one, module)) for one in inner.instructions.values()]
    named = sorted((one for one in scopes if one[1]), key=lambda one: one[0])
    return named[-1][1] if named else ""


def scope_of(op_name: str) -> str:
    """The modules and named scopes of an operation, such as `block_0/up` for `jit(f)/jvp(block_0)/up/dot_general`.

    Of an operation that stands for several, as `a;b` or `(a:b)`, those of the first that has any.
    """
    for one in re.split("[;:]", op_name):
        parts = _TRANSFORMATION.sub("", _CALLED_FUNCTION.sub("", one)).split("/")[:-1]
        names = [part.partition(".")[0] for part in parts if not _NO_SCOPE.fullmatch(part)]
        if scope := "/".join(filter(None, names)):
            return scope
    return ""
