"""The walk, by two small domains: one computes what a program computes, one writes down which copies are made when.

The first knows nothing of scan, while and cond: it runs nested programs as their entries and exits say, so these say all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.intra_op.lowering.copies import CopyingDomain
from autopar.program.evaluate import bind_equation
from autopar.program.from_jaxpr import program_of
from autopar.program.loops import Filled, Goes
from autopar.program.program import Equation
from autopar.program.walk import Domain, Scope, StaticDomain
from tests.intra_op.lowering.nested_programs import nested_program
from tests.oracles import assert_trees_close


class Arrays(Domain):
    """Whole arrays; every iteration of a loop is gone through."""

    def literal(self, atom, scope):
        return jnp.asarray(atom.val, atom.aval.dtype)

    def operation(self, eqn, scope):
        return bind_equation(eqn, [scope.value(v) for v in eqn.invars])

    def loop(self, eqn, scope):
        if eqn.branch_number is not None:
            number = int(jnp.clip(scope.value(eqn.branch_number).astype(int), 0, len(eqn.nested) - 1))
            return list(self.run(eqn, eqn.nested[number], scope, {}, {}, 0).values())
        body, *condition = eqn.nested
        carries = {e.carry: scope.value(e.carry.atom) for e in body.exits if e.carry is not None}
        returned = {e: carries[e.carry] for e in body.exits if e.carry is not None}
        rows = {e: [] for e in body.exits if e.goes is Goes.ROW}
        steps = range(eqn.loop.trips) if not condition else iter(int, 1)
        for step in reversed(steps) if eqn.loop.is_reversed else steps:
            if condition and not all(self.run(eqn, condition[0], scope, {}, returned, 0).values()):
                break
            ends = self.run(eqn, body, scope, carries, {}, step)
            returned = {e: x for e, x in ends.items() if e.carry is not None}
            carries = {e.carry: x for e, x in returned.items()}
            for e, made in rows.items():
                made.append(ends[e])
        stacks = {e: jnp.stack(made[::-1] if eqn.loop.is_reversed else made) for e, made in rows.items()}
        return [(returned | stacks)[e] for (e,) in eqn.results]

    def run(self, eqn, nested, scope, carries, returned, step):
        """A nested program once; what becomes of its exits."""
        inner = scope.inside(eqn)
        for entry in nested.entries:
            match entry.filled:
                case Filled.CONSTANT:
                    inner.values[entry.var] = scope.value(entry.atom)
                case Filled.CARRY:
                    inner.values[entry.var] = carries[entry]
                case Filled.ROW:
                    inner.values[entry.var] = scope.value(entry.atom)[step]
                case Filled.PASSED:
                    inner.values[entry.var] = returned[entry.passed]
        inner.run(nested.program.equations)
        return {exit_: inner.value(exit_.atom) for exit_ in nested.exits}


def walked(fun, *args):
    program, constants = program_of(jax.make_jaxpr(fun)(*args))
    scope = Scope(Arrays(), dict(zip(program.invars, (*args, *constants), strict=True)))
    scope.run(program.equations)
    return [scope.value(atom) for atom in program.outvars]


TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


def closes_over_arrays(x):
    total, rows = lax.scan(lambda c, i: (c + TABLE[i], c * 2), x, jnp.arange(4))
    total = lax.while_loop(lambda c: jnp.abs(c).sum() < jnp.abs(TABLE).sum(), lambda c: c * 2 + TABLE[0], total)
    return lax.switch(1, [lambda a: a + TABLE[0], lambda a: a * TABLE[1], lambda a: a], total), rows


def gradient_of_a_reversed_scan(x):
    return jax.grad(lambda x: jnp.sin(lax.scan(lambda c, row: (c * row, c), x, TABLE, reverse=True)[0]).sum())(x)


@pytest.mark.parametrize("fun", [closes_over_arrays, gradient_of_a_reversed_scan])
def test_entries_and_exits_say_what_control_flow_computes(fun):
    x = jnp.arange(1.0, 4.0)
    assert_trees_close(walked(fun, x), jax.tree.leaves(jax.jit(fun)(x)))


@pytest.mark.parametrize("seed", [3, 4, 23])
def test_entries_and_exits_say_what_loops_in_loops_compute(seed):
    fun, args = nested_program(seed, depth=2)
    assert_trees_close(walked(fun, *args), jax.tree.leaves(jax.jit(fun)(*args)))


# --- copies -----------------------------------------------------------------------------------------------------------


class Copies(CopyingDomain):
    """A value is its name; every equation takes its operands in the form "whole", which only gathered values must be made for."""

    def __init__(self, copy_span, gathered):
        self.copy_span, self.gathered, self.made = copy_span, gathered, []

    def literal(self, atom, scope):
        return "literal"

    def bring(self, value, form, aval, scope, *, late=None):
        self.made.append((value, scope.position, late))
        return f"{form} {value}"

    def is_gathered(self, value, form, aval):
        return value in self.gathered

    def operation(self, eqn, scope):
        for atom in eqn.invars:
            self.need(atom, "whole", scope)
        return [f"result {scope.position}"] * len(eqn.outvars)

    def loop(self, eqn, scope):
        raise NotImplementedError


def copies_of_the_first_argument(copy_span, *, uses, gathered=("w",)):
    """(position, what it waits for) of every copy of an operand that the equations at some positions use."""

    def fun(w, x):
        for position in range(max(uses) + 1):
            x = x * w if position in uses else jnp.sin(x)
        return x

    closed = jax.make_jaxpr(fun)(1.0, 1.0)
    domain = Copies(copy_span, gathered)
    scope = Scope(domain, dict(zip(closed.jaxpr.invars, "wx", strict=True)))
    scope.run(
        [
            Equation(
                primitive=e.primitive,
                invars=tuple(e.invars),
                outvars=tuple(e.outvars),
                params=e.params,
                source_info=e.source_info,
            )
            for e in closed.eqns
        ]
    )
    return [(position, late) for value, position, late in domain.made if value == "w"]


def test_a_copy_is_made_once():
    assert copies_of_the_first_argument(None, uses=(0, 1, 9)) == [(0, None)]


def test_a_gathered_copy_that_is_not_kept_is_made_again_when_it_was_unused_for_longer_than_the_span():
    assert copies_of_the_first_argument(3, uses=(1, 4, 8, 9)) == [(1, "result 0"), (8, "result 7")]


def test_a_copy_that_is_not_gathered_is_kept():
    assert copies_of_the_first_argument(3, uses=(1, 4, 8, 9), gathered=()) == [(1, None)]


def test_the_first_gathering_waits_too_unless_there_is_nothing_to_wait_for():
    assert copies_of_the_first_argument(3, uses=(2,)) == [(2, "result 1")]
    assert copies_of_the_first_argument(3, uses=(0,)) == [(0, None)]


# --- what a domain is told about where the walk is ----------------------------------------------------------------------


class Notes(StaticDomain):
    """A value is the set of names of the inputs that it depends on; what the walk says of its place is written down.

    `trips`: of every sin, how often it runs per step. `asking`: whether the loop asks where a value enters or leaves it.
    `rounds`: how often nested programs are gone through.
    """

    def __init__(self):
        self.trips, self.asking, self.rounds = [], [], 0

    def literal(self, atom, scope):
        return frozenset()

    def operation(self, eqn, scope):
        if eqn.primitive.name == "sin":
            self.trips.append(scope.trips)
        return [frozenset().union(*map(scope.value, eqn.invars))] * len(eqn.outvars)

    def enter(self, entry, scope, inner):
        self.asking.append(inner.asking is entry.loop)
        return scope.value(entry.atom)

    def carries_change(self, nested, inner):
        self.rounds += 1
        changed = False
        for exit_ in nested.exits:
            if exit_.carry is not None and not inner.value(exit_.atom) <= inner.values[exit_.carry.var]:
                inner.values[exit_.carry.var] |= inner.value(exit_.atom)
                changed = True
        return changed

    def leave(self, exit_, inner):
        self.asking.append(inner.asking is exit_.loop)
        return inner.value(exit_.atom)

    def finish(self, eqn, ends, scope):
        return [frozenset().union(*(ends[exit_] for exit_ in exits)) for exits in eqn.results]


def noted(fun, *args):
    """(the domain after the walk, what each output depends on)."""
    program, constants = program_of(jax.make_jaxpr(fun)(*args))
    assert not constants
    domain = Notes()
    scope = Scope(domain, {var: frozenset("abcdef"[i]) for i, var in enumerate(program.invars)})
    scope.run(program.equations)
    return domain, ["".join(sorted(scope.value(atom))) for atom in program.outvars]


def test_trips_of_loops_in_loops_multiply_and_a_program_that_runs_once_has_those_around_it():
    def inner(c, _):
        return lax.cond(c > 0, jnp.sin, jnp.cos, c), None

    def outer(c, _):
        return lax.scan(inner, jnp.sin(c), length=5)[0], None

    domain, _ = noted(lambda x: jnp.sin(lax.scan(outer, x, length=3)[0]), 1.0)
    assert domain.trips == [3, 15, 1]


def test_before_and_after_a_nested_program_the_loop_around_it_asks():
    domain, _ = noted(lambda x: lax.scan(lambda c, _: (jnp.sin(c) * 2, c), x, length=3), 1.0)
    assert domain.asking == [True] * 3  # one entry, a carry and a row that leave


def test_a_nested_program_is_gone_through_until_its_carries_change_no_more():
    """Each iteration hands b to a and c to b, so that a depends on the rows after the third."""

    def rotated(a, b, c, rows):
        return lax.scan(lambda carry, row: ((carry[1], carry[2], row), None), (a, b, c), rows)[0]

    domain, depends = noted(rotated, 1.0, 1.0, 1.0, jnp.ones(4))
    assert depends == ["bcd", "cd", "d"]
    assert domain.rounds > 2


class ResultNumbers(Domain):
    """A value is the name of the operation and the number of its result."""

    def literal(self, atom, scope):
        return "literal"

    def operation(self, eqn, scope):
        return [f"result {number} of {eqn.primitive.name}" for number in range(len(eqn.outvars))]

    def loop(self, eqn, scope):
        raise NotImplementedError


def test_what_others_wait_for_is_the_last_result_that_has_real_elements():
    def fun(x, key):
        low, high = jnp.split(x, 2)
        return low, high, high.astype(int), jax.random.fold_in(key, 1)

    program, _ = program_of(jax.make_jaxpr(fun)(jnp.arange(4.0), jax.random.key(0)))
    names = [eqn.primitive.name for eqn in program.equations]
    assert names.index("split") < names.index("convert_element_type") < names.index("random_fold_in")
    scope = Scope(ResultNumbers())
    scope.run([eqn for eqn in program.equations if eqn.primitive.name != "fan_out"])
    assert scope.latest == "result 1 of split"
