"""The text of an HLO module as computations and instructions, and how often each computation runs.

In: what `jax.stages.Compiled.as_text()` gives, one instruction a line. Out: `Computation`s by name, and for each the number
of times it runs when the program runs once, from the trip counts of the loops around it. Types are kept as bytes and
dimensions. What can go wrong: a loop whose trip count XLA does not state and whose condition is not a plain counter; it is
taken to run once and reported as not exact.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Shape:
    """A type: an array's bytes and dimensions, or a tuple's members."""

    bytes: int = 0
    members: tuple[Shape, ...] | None = None
    dims: tuple[int, ...] = ()

    def arrays(self) -> Iterator[int]:
        """The bytes of each array, tuples flattened."""
        if self.members is None:
            yield self.bytes
        for member in self.members or ():
            yield from member.arrays()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation; `arguments` is the text between the opcode's brackets, `attributes` all after it."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions: the entry, a loop's body, a reducer, ..."""

    name: str
    is_entry: bool
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions.values() if i.is_root), None)


_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*(?:$|/)")
_DEFINITION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](?:\{[^}]*\})?\s*")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_COMMA = re.compile(r"[,\s]+")
_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"%?([\w.\-]+)$")


def parse_module(text: str) -> dict[str, Computation]:
    """All computations by name."""
    module: dict[str, Computation] = {}
    instructions: dict[str, Instruction] | None = None
    for raw in text.splitlines():
        line = _COMMENT.sub("", raw) if "/*" in raw else raw
        if line.startswith("}"):
            instructions = None
        elif instructions is not None:
            instruction = _parse_instruction(line)
            if instruction is not None:
                instructions[instruction.name] = instruction
        elif not line.startswith("HloModule") and (header := _HEADER.match(line)):
            instructions = {}
            module[header[2]] = Computation(header[2], header[1] is not None, instructions)
    if not any(computation.is_entry for computation in module.values()):
        raise ValueError(f"no ENTRY computation: this is not the text of an HLO module, it begins {text[:60]!r}")
    return module


def _parse_instruction(line: str) -> Instruction | None:
    definition = _DEFINITION.match(line)
    if definition is None:
        return None
    shape, position = _parse_shape(line, definition.end())
    opcode = _OPCODE.match(line, position)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    words = [_WORD.search(argument.strip()) for argument in split_at_commas(arguments)]
    operands = tuple(word[1] for word in words if word)
    return Instruction(
        name=definition[2],
        shape=shape,
        opcode=opcode[1],
        operands=operands,
        arguments=arguments,
        attributes=line[close + 1 :],
        is_root=definition[1] is not None,
    )


def _parse_shape(line: str, position: int) -> tuple[Shape, int]:
    """The type that starts at `position`, and where the text goes on after it."""
    if line[position] == "(":
        members = []
        position += 1
        while line[position] != ")":
            member, position = _parse_shape(line, position)
            members.append(member)
            position = _after(_COMMA, line, position)
        return Shape(members=tuple(members)), _after(_SPACE, line, position + 1)
    array = _ARRAY.match(line, position)
    if array is None:
        raise ValueError(f"cannot read the type at {line[position : position + 40]!r} in {line.strip()[:120]!r}")
    dims = tuple(int(dim.strip(" <=")) for dim in array[2].split(",") if dim.strip())
    return Shape(math.ceil(math.prod(dims) * _bits(array[1]) / 8), dims=dims), array.end()


def _after(skipped: re.Pattern[str], line: str, position: int) -> int:
    match = skipped.match(line, position)
    return match.end() if match else position


def _bits(dtype: str) -> int:
    if dtype in ("token", "opaque"):
        return 0
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    if digits is None:
        raise ValueError(f"unknown element type {dtype!r}")
    return int(digits[0])


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`; brackets in quotes do not count."""
    depth, quoted = 0, False
    for index in range(opening, len(text)):
        char = text[index]
        if char == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif not quoted and char in "([{":
            depth += 1
        elif not quoted and char in ")]}":
            depth -= 1
            if depth == 0:
                return index
    raise ValueError(f"unbalanced brackets in {text.strip()[:120]!r}")


def split_at_commas(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


_CALLEES = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:\{([^}]*)\}|%?([\w.\-]+))"
)


def runs_per_step(module: dict[str, Computation]) -> dict[str, tuple[int, bool]]:
    """How often each computation runs when the entry runs once, and whether every loop around it was understood.

    runs(c) = sum over calls of c in d of runs(d) * trips(call),    runs(entry) = 1
    """
    runs: dict[str, tuple[int, bool]] = {}

    def add(name: str, times: int, exact: bool) -> None:
        count, was_exact = runs.get(name, (0, True))
        runs[name] = (count + times, was_exact and exact)
        for callee, trips, known in _calls(module, module[name]):
            add(callee, times * trips, exact and known)

    for computation in module.values():
        if computation.is_entry:
            add(computation.name, 1, True)
    return runs


def _calls(module: dict[str, Computation], computation: Computation) -> Iterator[tuple[str, int, bool]]:
    """The computations that one runs, with how often and whether that is known.

    The later halves of an asynchronous pair name the same computation again, and run nothing.
    """
    for instruction in computation.instructions.values():
        if instruction.opcode.endswith(("-done", "-update")):
            continue
        trips = _trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
        for role, many, one in _CALLEES.findall(instruction.attributes):
            for callee in re.findall(r"[\w.\-]+", many) if many else [one]:
                if callee in module:
                    extra = role == "condition" and trips is not None
                    yield callee, (trips or 1) + extra, trips is not None


def _trip_count(module: dict[str, Computation], computation: Computation, loop: Instruction) -> int | None:
    """Trips of a while loop: as XLA states them, or of a condition i < constant with i = 0, 1, 2, ...; else None."""
    stated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if stated:
        return int(stated[1])
    callees = {role: one for role, _, one in _CALLEES.findall(loop.attributes)}
    condition, body = module.get(callees.get("condition", "")), module.get(callees.get("body", ""))
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    index, limit = _element(condition, compare.operands[0]), _constant(condition, compare.operands[1])
    if index is None or limit is None or body.root.opcode != "tuple":
        return None
    start = computation.instructions.get(loop.operands[0])
    if start is None or start.opcode != "tuple" or _constant(computation, start.operands[index]) != 0:
        return None
    step = body.instructions.get(body.root.operands[index])
    if step is None or step.opcode != "add":
        return None
    terms = [(_element(body, name), _constant(body, name)) for name in step.operands]
    return limit if sorted(terms, key=str) == [(index, None), (None, 1)] else None


def _element(computation: Computation, name: str) -> int | None:
    """The index if `name` is an element of the computation's parameter."""
    instruction = computation.instructions.get(name)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    index = re.search(r"index=(\d+)", instruction.attributes)
    return int(index[1]) if index else None


def _constant(computation: Computation, name: str) -> int | None:
    """The value if `name` is a whole scalar constant, or a copy of one."""
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode in ("copy", "bitcast"):
        return _constant(computation, instruction.operands[0])
    whole = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.arguments.strip())
    return int(instruction.arguments) if whole else None
