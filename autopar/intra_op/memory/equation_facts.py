"""What the memory model asks of an equation for every choice that it prices, found once.

In: an equation. Out: `EquationFacts`, the same for all choices and meshes. The entry of the rule table is not among them:
users can register another one. What can go wrong: facts that hold their equation would keep it for ever.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Sequence

from autopar.compat import Literal, module_path
from autopar.intra_op.memory.compilers import Compiler
from autopar.intra_op.memory.device_operations import Kind
from autopar.intra_op.xla_cpu import table as xla_cpu
from autopar.intra_op.xla_cpu.contraction_orders import Orders
from autopar.intra_op.xla_cpu.table import Making
from autopar.program.fingerprint import operation_key
from autopar.program.program import Equation, fan_out_p


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EquationFacts:
    """`orders` to `adds`: what XLA makes of the equation, as in `xla_cpu/table.py`.

    `names`: of its results; `scope`: the module that it comes from. `work`: equal for equations that do the same with equal
    operands, of which XLA keeps one; None where it does not look. `variables`: the places of operands that are no literals.
    """

    orders: Orders | None
    making: Making
    dear_below: float
    factor: Hashable
    takes_factors: bool
    by_library: bool
    adds: bool
    names: tuple[str, ...]
    scope: str
    work: Hashable
    variables: tuple[int, ...]


_KNOWN: weakref.WeakKeyDictionary[Equation, EquationFacts] = weakref.WeakKeyDictionary()


def facts_of(eqn: Equation) -> EquationFacts:
    """The facts of an equation that is no loop."""
    found = _KNOWN.get(eqn)
    if found is None:
        found = _KNOWN[eqn] = _find_facts(eqn)
    return found


def result_name(eqn: Equation, shape: Sequence[int]) -> str:
    """The name of a value that an equation makes."""
    return f"reused value {tuple(shape)}" if eqn.primitive is fan_out_p else f"{eqn.primitive.name} {tuple(shape)}"


def _find_facts(eqn: Equation) -> EquationFacts:
    making = xla_cpu.making_of(eqn)
    return EquationFacts(
        orders=xla_cpu.orders_of(eqn),
        making=making,
        dear_below=xla_cpu.dear_below(eqn),
        factor=xla_cpu.factor_of(eqn),
        takes_factors=xla_cpu.takes_factors(eqn),
        by_library=xla_cpu.can_join_library(eqn),
        adds=xla_cpu.can_move_sums(eqn),
        names=tuple(result_name(eqn, v.aval.shape) for v in eqn.outvars),
        scope=module_path(eqn),
        work=None if making in (Making.WHOLE, Making.IN_PLACE) or eqn.after is not None else _work(eqn),
        variables=tuple(place for place, v in enumerate(eqn.invars) if not isinstance(v, Literal)),
    )


def _work(eqn: Equation) -> Hashable:
    """What an equation does, with the literals that it reads."""
    literals = tuple((str(v.aval), str(v.val)) if isinstance(v, Literal) else None for v in eqn.invars)
    return operation_key(eqn), literals


_KINDS = {
    Making.WHOLE: Kind.WHOLE,
    Making.NAME: Kind.CHEAP,
    Making.SAME: Kind.CHEAP,
    Making.CHEAP: Kind.CHEAP,
    Making.MOVED: Kind.MOVED,
    Making.COSTLY: Kind.COSTLY,
    Making.REDUCTION: Kind.REDUCE,
    Making.LIBRARY: Kind.LIBRARY,
}


def kind_of(facts: EquationFacts, compiler: Compiler, itemsize: int) -> Kind:
    """How a compiler runs an operation whose result has elements of so many bytes."""
    if facts.making is Making.LIBRARY and not compiler.has_library:
        return Kind.REDUCE
    if facts.dear_below > itemsize * compiler.operations_per_byte:
        return Kind.DEAR
    return _KINDS[facts.making]
