"""The arithmetic of a compiled program: floating-point operations of its matrix products and convolutions.

In: the text of a compiled module. Out: the operations of one device, 2 for each multiply-add, as often as the loops around
them run:

    product        2 x elements of the result x elements contracted
    convolution    2 x elements of the result x elements of the kernel / its output features

A convolution is counted without its borders, as the planner's rules count it, and without zeros between the rows of its left
operand (dilation of the base, or a copy that was padded between rows), which libraries step over or multiply. GPUs do both in
libraries; their calls hold the same dimensions. What can go wrong: a library call of another kind, such as attention in one
piece; it is counted as nothing and named.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from autopar.hlo.text import Computation, Instruction, parse_module, runs_per_step

_LISTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_IN_CONFIG = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_BASE_DILATION = re.compile(r"lhs_dilate=([\dx]+)")
_PADDING = re.compile(r"padding=([\d_x\-]+)")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_GEMM = ("gemm", "matmul")
_CONVOLUTION = "conv"
_LIBRARIES = re.compile(r"cublas|cudnn|onednn|hipblas|miopen", re.IGNORECASE)


Module = Mapping[str, Computation]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """What one device computes.

    Attributes:
        flops: operations of products and convolutions.
        is_exact: whether all loops around them are of known length.
        unknown: library calls whose operations are not known.
    """

    flops: float = 0.0
    is_exact: bool = True
    unknown: tuple[str, ...] = ()


def arithmetic(hlo_text: str) -> Arithmetic:
    """The operations of a module's products and convolutions. Raises ValueError for text that is not an HLO module."""
    module = parse_module(hlo_text)
    runs = runs_per_step(module)
    flops, is_exact, unknown = 0.0, True, dict[str, None]()
    for computation in module.values():
        times, exact = runs.get(computation.name, (0, True))
        for instruction in computation.instructions.values() if times else ():
            each = flops_of(instruction, computation, module)
            if each is None:
                unknown[_target(instruction)] = None
            elif each:
                flops, is_exact = flops + times * each, is_exact and exact
    return Arithmetic(flops, is_exact, tuple(unknown))


def flops_of(instruction: Instruction, computation: Computation, module: Module) -> float | None:
    """Those of one instruction of a computation of a module; None if it is a library call that is not known."""
    each = _with_holes(instruction, computation)
    return each / _holes(instruction, computation, module) if each else each


def _with_holes(instruction: Instruction, computation: Computation) -> float | None:
    if instruction.opcode == "dot":
        return _of_product(instruction, computation, _LISTED)
    if instruction.opcode == "convolution":
        return _of_convolution(instruction, computation, result=None, kernel=1)
    target = _target(instruction)
    if not target or not _LIBRARIES.search(target):
        return 0.0
    if any(word in target for word in _GEMM):
        return _of_product(instruction, computation, _IN_CONFIG)
    if _CONVOLUTION in target.lower() and "Input" in target:
        return _of_convolution(instruction, computation, result=0, kernel=1)
    if _CONVOLUTION in target.lower() and "Filter" in target:
        return _of_convolution(instruction, computation, result=1, kernel=None)
    return _of_convolution(instruction, computation, result=None, kernel=1) if "conv" in target.lower() else None


def _target(instruction: Instruction) -> str:
    """What a custom call calls; empty for other instructions."""
    found = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    return found[1] if found else ""


def _of_product(instruction: Instruction, computation: Computation, contracted: re.Pattern[str]) -> float | None:
    found, left = contracted.search(instruction.attributes), _dims(instruction, computation, 0)
    if found is None or left is None:
        return None
    numbers = [int(number) for number in re.findall(r"\d+", found[1])]
    return 2.0 * math.prod(_result_dims(instruction)) * math.prod(left[number] for number in numbers)


def _of_convolution(
    instruction: Instruction, computation: Computation, *, result: int | None, kernel: int | None
) -> float | None:
    """`result` and `kernel`: the operands that are the forward convolution's, None for what this one makes."""
    made = _result_dims(instruction)
    out = made if result is None else _dims(instruction, computation, result)
    weights = made if kernel is None else _dims(instruction, computation, kernel)
    labels = _LABELS.search(instruction.attributes)
    if out is None or weights is None or labels is None:
        return None
    return 2.0 * math.prod(out) * math.prod(weights) / max(weights[labels[2].index("o")], 1)


def _holes(instruction: Instruction, computation: Computation, module: Module) -> int:
    """How many times as many rows the left operand has with zeros between them."""
    dilated = _BASE_DILATION.search(instruction.attributes)
    if dilated is not None:
        return math.prod(map(int, dilated[1].split("x")))
    padded = _padded(instruction, computation, module) if _LABELS.search(instruction.attributes) else None
    sides = [side.split("_") for side in padded.split("x")] if padded else []
    return math.prod(1 + int(side[2]) for side in sides if len(side) > 2)


def _padded(instruction: Instruction, computation: Computation, module: Module) -> str | None:
    """How the left operand was padded, low_high or low_high_between of each dimension, by itself or in a fusion; None if not."""
    made = computation.instructions.get(instruction.operands[0])
    called = _CALLED.search(made.attributes) if made is not None else None
    root = module[called[1]].root if called is not None and called[1] in module else made
    found = _PADDING.search(root.attributes) if root is not None and root.opcode == "pad" else None
    return found[1] if found else None


def _result_dims(instruction: Instruction) -> tuple[int, ...]:
    """Of what an instruction makes; a library call also makes scratch memory, which is its second result."""
    members = instruction.shape.members
    return members[0].dims if members else instruction.shape.dims


def _dims(instruction: Instruction, computation: Computation, operand: int) -> tuple[int, ...] | None:
    made = computation.instructions.get(instruction.operands[operand]) if operand < len(instruction.operands) else None
    return None if made is None else _result_dims(made)
