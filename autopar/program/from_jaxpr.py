"""A jaxpr as a `Program`: calls are inlined, loops and branches opened, values that are read often are fanned out.

In: a closed jaxpr. Out: the program and the values of its constants, which become its last inputs. What can go wrong: an equation
with a side effect, which is refused with the user's line; code inside a kernel, which is never opened.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import jax
from jax.lax import optimization_barrier_p

from autopar import compat
from autopar.avals import bytes_of, is_opaque
from autopar.compat import JaxprEqn, Literal, Var
from autopar.program.late_tails import with_late_tails
from autopar.program.loops import Loop, LoopEquation
from autopar.program.observe import answering, branch_that_returns, is_call, is_observer, observe, refuse_side_effects
from autopar.program.opened.called import branch_that_runs, operands_of
from autopar.program.opened.constrain import PARAMETER_OF, asked_of, constrain_p
from autopar.program.opened.depths import Depths
from autopar.program.opened.islands import opened_by
from autopar.program.opened.rolls import with_rolls
from autopar.program.program import Atom, Equation, Program, Tag, can_be_awaited, fan_out_p, variables_of
from autopar.program.tags import tagged_call_p

ONE_BY_ONE = ("device_put", "psum", "pmax", "pmin")
"""Operations that do the same to each operand by itself, whatever the others are."""
PER_OPERAND = ("devices", "srcs", "copy_semantics")
"""Those of their parameters that are tuples with an entry for each operand."""
SMALL_BYTES = 1024
"""An argument of the program up to this size, such as a random key, also waits at a barrier; larger ones are only kept apart."""
WHILE_TRIPS = 8
"""What planning assumes of a loop whose length is not known before it runs."""


def program_of(closed: Any, *, rearranged: bool = False) -> tuple[Program, tuple[Any, ...]]:
    """(program, constants): the constants are the values of the program's last inputs.

    `rearranged`: loops lose the results that nobody reads, too, and what they make of sums for results alone comes after them.
    Programs that count on the places of their loops' results are not rearranged.
    """
    refuse_side_effects(compat.open_jaxpr(closed))
    constants = list(compat.constants_of(closed))
    jaxpr = compat.open_jaxpr(closed)
    jaxpr = compat.eliminate_dead_code(jaxpr) if rearranged else jaxpr
    builder = _ProgramBuilder(rearranged=rearranged)
    fresh = [Var(v.aval) for v in jaxpr.invars]
    constvars = [Var(v.aval) for v in jaxpr.constvars]
    builder.constants.extend(zip(constvars, constants, strict=True))
    outs = builder.show_observed(builder.inline(jaxpr, constvars, fresh))
    held = [v for v, _ in builder.constants]
    opened = Program((*fresh, *held), builder.finish(outs), tuple(outs))
    program = _with_fan_outs(_without_dead_code(opened))
    return program, tuple(value for _, value in builder.constants)


class _ProgramBuilder:
    """Equations of one scope while jaxprs are inlined into it."""

    def __init__(self, *, rearranged: bool, is_way_back: bool = False) -> None:
        self.rearranged, self.is_way_back = rearranged, is_way_back
        self.equations: list[Equation] = []
        self.constants: list[tuple[Var, Any]] = []
        self.tag: Tag | None = None
        self.observers: list[tuple[JaxprEqn, list[Atom]]] = []
        self._read: Set[Var] = frozenset()
        self._unread: set[int] = set()
        self._depths = Depths()

    def inline(self, jaxpr: Any, consts: Sequence[Atom], args: Sequence[Atom]) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        outer, self._read = self._read, set(variables_of(jaxpr.outvars))
        self._read = self._read.union(*(variables_of(eqn.invars) for eqn in jaxpr.eqns))
        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            called = opened_by(eqn)
            results = self._operation(eqn, operands) if called is None else self._call(eqn, called, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        self._read = outer
        return [read(v) for v in jaxpr.outvars]

    def _call(self, eqn: JaxprEqn, closed: Any, operands: list[Atom]) -> list[Atom]:
        operands = list(operands_of(closed, operands))
        if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
            operands = self._barrier(eqn, operands)
        outer = self.tag
        self.tag = eqn.params["tag"] if eqn.primitive is tagged_call_p else outer
        results = self.inline(compat.open_jaxpr(closed), self._constants(closed), operands)
        self.tag = outer
        return results

    def _constants(self, closed: Any) -> list[Atom]:
        """Fresh inputs for the constants of an inlined jaxpr."""
        values = compat.constants_of(closed)
        fresh = [Var(v.aval) for v in compat.open_jaxpr(closed).constvars]
        self.constants.extend(zip(fresh, values, strict=True))
        return list(fresh)

    def _barrier(self, eqn: JaxprEqn, operands: Sequence[Atom]) -> list[Atom]:
        """Operands that are there only together: one copy each, which waits for the operand that is made last."""
        made = self._depths.after(self.equations)
        there = dict.fromkeys(v for v in operands if not isinstance(v, Literal) and v in made)
        last = max(filter(can_be_awaited, there), key=made.__getitem__, default=None)
        waits = [
            not isinstance(v, Literal) and v is not last and (v in there or bytes_of(v) <= SMALL_BYTES)
            for v in operands
        ]
        return [self._keep_apart(eqn, v, last if late else None) for v, late in zip(operands, waits, strict=True)]

    def _keep_apart(self, eqn: JaxprEqn, operand: Atom, after: Var | None) -> Atom:
        if isinstance(operand, Literal):
            return operand
        out = Var(operand.aval)
        self.equations.append(
            Equation(
                primitive=optimization_barrier_p,
                invars=(operand,),
                outvars=(out,),
                params={},
                source_info=eqn.source_info,
                tag=self.tag,
                after=after,
            )
        )
        return out

    def _operation(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Atom]:
        if eqn.primitive is optimization_barrier_p:
            return self._barrier(eqn, operands)
        if eqn.primitive.name in ONE_BY_ONE:
            return self._one_by_one(eqn, operands)
        if is_observer(eqn):
            self.observers.append((eqn, operands))
            return []
        call = answering(eqn, operands) if is_call(eqn) else None
        if call is not None:
            self.equations.append(dataclasses.replace(call, tag=self.tag))
            self.observers.append((eqn, list(call.outvars[-1:])))
            return list(call.outvars[:-1])
        if (number := branch_that_runs(eqn, operands)) is not None:
            closed = eqn.params["branches"][number]
            return self.inline(compat.open_jaxpr(closed), self._constants(closed), operands[1:])
        if eqn.primitive.name == "cond" and not eqn.outvars:
            closed = branch_that_returns(eqn)
            self.observers.append((eqn, self.inline(compat.open_jaxpr(closed), self._constants(closed), operands)))
            return []
        primitive, params = eqn.primitive, dict(eqn.params)
        if primitive.name in PARAMETER_OF:
            asked = asked_of(eqn)
            if asked is None:
                return operands
            primitive, params = constrain_p, {"asked": asked}
        outs = [Var(v.aval) for v in eqn.outvars]
        made = Equation(
            primitive=primitive,
            invars=tuple(operands),
            outvars=tuple(outs),
            params=params,
            source_info=eqn.source_info,
            tag=self.tag,
        )
        opened = _OPENERS.get(eqn.primitive.name)
        if opened is None:
            self.equations.append(made)
            return list(outs)
        return self._loop(eqn, self._open(made, *opened(self, eqn, operands)))

    def _loop(self, eqn: JaxprEqn, loop: LoopEquation) -> list[Atom]:
        """The results of control flow, of which a part may come after it."""
        outs, is_unread = loop.outvars, id(eqn) in self._unread
        if is_unread:  # what shows something is not left out because nobody reads what it returns
            self.observers.append((eqn, [*sorted((v for v in outs if not is_opaque(v.aval)), key=bytes_of)[:1]]))
        may_move = self.rearranged and loop.loop.kind == "scan" and self._goes_back(eqn) and not is_unread
        late = with_late_tails(loop) if may_move else None
        if late is None:
            self.equations.append(loop)
            return list(outs)
        closed = jax.make_jaxpr(late)(*map(_shape_of, loop.invars))
        alive = compat.eliminate_dead_code(compat.open_jaxpr(closed))
        return self.inline(alive, self._constants(closed), loop.invars)

    def _one_by_one(self, eqn: JaxprEqn, operands: Sequence[Atom]) -> list[Atom]:
        """An equation for each operand of one of `ONE_BY_ONE`."""
        outs = [Var(v.aval) for v in eqn.outvars]
        for number, (operand, out) in enumerate(zip(operands, outs, strict=True)):
            own = {name: eqn.params[name][number : number + 1] for name in PER_OPERAND if name in eqn.params}
            self.equations.append(
                Equation(
                    primitive=eqn.primitive,
                    invars=(operand,),
                    outvars=(out,),
                    params={**eqn.params, **own},
                    source_info=eqn.source_info,
                    tag=self.tag,
                )
            )
        return list(outs)

    def _open(self, eqn: Equation, loop: Loop, operands: Sequence[Atom], regions: tuple[Program, ...]) -> LoopEquation:
        """Control flow, with what its nested programs close over as operands."""
        return LoopEquation(
            primitive=eqn.primitive,
            invars=tuple(operands),
            outvars=eqn.outvars,
            params=eqn.params,
            source_info=eqn.source_info,
            regions=regions,
            tag=eqn.tag,
            loop=loop,
        )

    def show_observed(self, results: list[Atom], read: Sequence[bool] = ()) -> list[Atom]:
        """Return the program's results. One of them waits until Python has seen what is shown, of a loop one that is read."""
        for eqn, operands in self.observers:
            made, results = observe(eqn, operands, results, read)
            self.equations.append(made)
        return results

    def finish(self, results: Sequence[Atom]) -> tuple[Equation, ...]:
        """The scope's equations, rolls as one operation each."""
        return tuple(with_rolls(self.equations, results))

    def _goes_back(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is part of a derivative going back, by itself or by what it is nested in."""
        return self.is_way_back or "transpose" in compat.transformations(eqn)

    def region(self, closed: Any, around: JaxprEqn) -> tuple[Program, list[Var]]:
        """(nested program, outer constants it closes over, which are its first inputs); `around`: the equation that it is of."""
        jaxpr = compat.open_jaxpr(closed)
        inner = _ProgramBuilder(rearranged=self.rearranged, is_way_back=self._goes_back(around))
        args = [Var(v.aval) for v in jaxpr.invars]
        read = [v in self._read for v in around.outvars]
        outs = inner.show_observed(inner.inline(jaxpr, inner._constants(closed), args), read)
        if inner.observers and not any(read):
            self._unread.add(id(around))
        captured = [v for v, _ in inner.constants]
        outer = [Var(v.aval) for v in captured]
        self.constants.extend(zip(outer, (value for _, value in inner.constants), strict=True))
        return Program((*captured, *args), inner.finish(outs), tuple(outs)), outer


def _shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _open_scan(
    builder: _ProgramBuilder, eqn: JaxprEqn, operands: list[Atom]
) -> tuple[Loop, list[Atom], tuple[Program, ...]]:
    consts, carries = compat.scan_counts(eqn.params)
    body, captured = builder.region(eqn.params["jaxpr"], eqn)
    loop = Loop(
        kind="scan",
        consts=len(captured) + consts,
        carries=carries,
        trips=eqn.params["length"],
        captured=frozenset(range(len(captured))),
        is_reversed=eqn.params.get("reverse", False),
        unroll=eqn.params.get("unroll", 1),
    )
    return loop, [*captured, *operands], (body,)


def _open_while(
    builder: _ProgramBuilder, eqn: JaxprEqn, operands: list[Atom]
) -> tuple[Loop, list[Atom], tuple[Program, ...]]:
    cond_n, body_n = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, cond_captured = builder.region(eqn.params["cond_jaxpr"], eqn)
    body, body_captured = builder.region(eqn.params["body_jaxpr"], eqn)
    cond_consts = [*cond_captured, *operands[:cond_n]]
    body_consts = [*body_captured, *operands[cond_n : cond_n + body_n]]
    carries = operands[cond_n + body_n :]
    first = len(cond_consts)
    loop = Loop(
        kind="while",
        consts=len(body_consts),
        carries=len(carries),
        condition_consts=first,
        trips=WHILE_TRIPS,
        captured=frozenset((*range(len(cond_captured)), *range(first, first + len(body_captured)))),
    )
    return loop, [*cond_consts, *body_consts, *carries], (condition, body)


def _open_cond(
    builder: _ProgramBuilder, eqn: JaxprEqn, operands: list[Atom]
) -> tuple[Loop, list[Atom], tuple[Program, ...]]:
    opened = [builder.region(branch, eqn) for branch in eqn.params["branches"]]
    captured = [v for _, outer in opened for v in outer]
    regions, start = [], 0
    for region, outer in opened:
        own, rest = region.invars[: len(outer)], region.invars[len(outer) :]
        padded = [Var(v.aval) for v in captured]
        padded[start : start + len(own)] = own
        start += len(own)
        regions.append(Program((*padded, *rest), region.equations, region.outvars))
    loop = Loop(kind="cond", captured=frozenset(range(1, 1 + len(captured))))
    return loop, [operands[0], *captured, *operands[1:]], tuple(regions)


_OPENERS = {"scan": _open_scan, "while": _open_while, "cond": _open_cond}


def _without_dead_code(program: Program) -> Program:
    needed = {v for v in program.outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(program.equations):
        if any(v in needed for v in eqn.outvars):
            kept.append(dataclasses.replace(eqn, regions=tuple(_without_dead_code(r) for r in eqn.regions)))
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return Program(program.invars, tuple(reversed(kept)), program.outvars)


def _with_fan_outs(program: Program, *, around: Equation | None = None) -> Program:
    """Insert `fan_out` equations; see the module's text for where. `around`: the loop that a nested program is of."""
    nested = around is not None
    uses = Counter(v for eqn in program.equations for v in set(variables_of(eqn.invars)))
    uses.update(variables_of(program.outvars))
    renamed: dict[Var, Var] = {}
    equations: list[Equation] = []

    def spread(var: Var, source_info: Any, tag: Tag | None = None) -> None:
        renamed[var] = Var(var.aval)
        equations.append(
            Equation(
                primitive=fan_out_p, invars=(var,), outvars=(renamed[var],), params={}, source_info=source_info, tag=tag
            )
        )

    def now(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    readers: dict[Var, Equation] = {}
    for eqn in program.equations:
        for var in variables_of(eqn.invars):
            readers.setdefault(var, eqn)
    first = program.equations[0] if program.equations else around  # a branch may hand on what it is given
    info = compat.unknown_source() if first is None else first.source_info
    for var in program.invars:
        if nested or uses[var] > 1:
            spread(var, readers[var].source_info if var in readers else info)
    for eqn in program.equations:
        regions = tuple(_with_fan_outs(region, around=eqn) for region in eqn.regions)
        equations.append(dataclasses.replace(eqn, invars=tuple(now(v) for v in eqn.invars), regions=regions))
        for var in eqn.outvars:
            if uses[var] > 1:
                spread(var, eqn.source_info, eqn.tag)
    outvars: list[Atom] = []
    for atom in program.outvars:
        atom = now(atom)
        if not isinstance(atom, Literal) and nested:
            copy = Var(atom.aval)
            equations.append(
                Equation(primitive=fan_out_p, invars=(atom,), outvars=(copy,), params={}, source_info=info)
            )
            atom = copy
        outvars.append(atom)
    return Program(program.invars, tuple(equations), tuple(outvars))
