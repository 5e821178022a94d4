"""Oracle 3: a rule's promise holds. No collective is needed but those that its partial results stand for.

Twice, for every strategy of every example in `examples.py`:

- our lowering: the operation on local shards, under `shard_map`, holds no collective but what its row says that devices
  exchange within it, and what the devices hold is the result in the layout that the strategy promises: tiles in place,
  partial results combining to it;
- XLA's partitioner: plain `jax.jit` of the function with inputs sharded as the strategy says, and outputs likewise with
  partial results asked for whole, inserts one all-reduce of the promised bytes per partial result, and nothing else. The fast
  part asks this of the first example of each primitive.

On a mesh of two equal axes the fast part takes one of two strategies that differ in the names of the axes alone. Dozens of
operations work element by element, and have the same strategies: there each takes a fourth of them, which its name picks.
"""

import zlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autopar.avals import is_opaque
from autopar.intra_op.choices.strategies import strategies_of
from autopar.layouts.mesh import Layout, LogicalMesh
from autopar.rules.on_shard import LocalCall
from autopar.rules.table import entry_for, rule_for
from tests.layouts.values import assert_holds, device_mesh, held_by_devices
from tests.oracles import census_of_text
from tests.rules.examples import EXAMPLES

MESHES = ((4,), (2, 2))
CASES = [(name, number) for name in EXAMPLES for number in range(len(EXAMPLES[name]))]

XLA_DOES_WORSE = {
    **{(name, number): "gathers" for name in ("attention", "attention_backward") for number in range(3)},
    ("conv_general_dilated", 3): "gathers feature groups that are cut inside of the compound dimension",
    ("conv_general_dilated", 5): "with batch groups reduces over both axes where one is partial",
    ("fft", 0): "gathers the batch, with JAX 0.10",
    ("fft", 1): "as the other",
    ("igamma", 0): "runs until all elements have converged, and asks all devices",
    ("igammac", 0): "as igamma",
    ("mulhi", 0): "has no such operation on several devices",
    ("random_gamma", 0): "runs until all elements are drawn, and asks all devices",
    ("top_k", 0): "gathers the other dimensions",
    ("triangular_solve", 0): "gathers right-hand sides",
    ("triangular_solve", 1): "as the other",
}
KEYS = ("random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap", "random_bits")
"""Operations on random keys, which XLA's partitioner sees as hashes of integers."""
LESS_WORK = {"xla_backend_optimization_level": 0}


def renamed(strategy, axes):
    """What a strategy says, with other numbers for the axes: factors and their axes, layouts of inputs and outputs."""

    def along(numbers):
        return tuple(axes[number] for number in numbers)

    sides = [
        [(tuple(map(along, la.dims)), tuple(sorted((axes[a], monoid) for a, monoid in la.partial))) for la in side]
        for side in (strategy.inputs, strategy.outputs)
    ]
    return repr((sorted((factor, along(numbers)) for factor, numbers in strategy.factor_axes), sides))


def one_of_each_pair(strategies):
    """Of strategies on a mesh of two equal axes, one of any two that are each other's with the axes exchanged: by turns."""
    pairs = {}
    for strategy in strategies:
        pairs.setdefault(frozenset((renamed(strategy, (0, 1)), renamed(strategy, (1, 0)))), []).append(strategy)
    return [pair[number % len(pair)] for number, pair in enumerate(pairs.values())]


def works_by_elements(rule):
    """Whether operands that are no scalars, and results, have the same dimensions, each of which may be divided."""
    shapes = {*rule.inputs, *rule.outputs} - {()}
    return len(shapes) == 1 and any(rule.inputs) and not rule.whole


def shared_among_operations(name, rule, strategies):
    """A fourth of the strategies of an operation that works element by element; other operations have the rest."""
    return (works_by_elements(rule) and strategies[zlib.crc32(name.encode()) % 4 :: 4]) or strategies


# --- our lowering -----------------------------------------------------------------------------------------------------


def example_operands(name, number):
    """(equation, operand values): literals as they stand, the others are the example's arguments."""
    example = EXAMPLES[name][number]
    eqn, numbers = example.instance(name)
    values = [v.val if n is None else example.args[n] for v, n in zip(eqn.invars, numbers, strict=True)]
    return eqn, [
        np.asarray(x, v.aval.dtype) if not is_opaque(v.aval) else x for x, v in zip(values, eqn.invars, strict=True)
    ]


def held(value, layout, mesh):
    """What devices hold, mesh dimensions first; a key is whole on all."""
    if isinstance(value, jax.Array):
        return jnp.broadcast_to(value, (*mesh.shape, *value.shape))
    return held_by_devices(value, layout, mesh)


def local_results(eqn, rule, strategies, values, mesh):
    """(what the devices hold after the operation, for each strategy; the compiled program's text)."""
    spec = PartitionSpec(*mesh.axis_names)
    lead = len(mesh.shape)

    def run(*operands):
        results = []
        for strategy, shards in zip(strategies, operands, strict=True):
            local = tuple(x.reshape(x.shape[lead:]) for x in shards)
            call = LocalCall(eqn=eqn, operands=local, rule=rule, factor_axes=dict(strategy.factor_axes), mesh=mesh)
            results.append([x.reshape((1,) * lead + x.shape) for x in entry_for(eqn).local(call)])
        return results

    mapped = jax.shard_map(run, mesh=device_mesh(mesh.shape), in_specs=spec, out_specs=spec, check_vma=False)
    operands = [tuple(held(x, la, mesh) for x, la in zip(values, s.inputs, strict=True)) for s in strategies]
    compiled = jax.jit(mapped).lower(*operands).compile(compiler_options=LESS_WORK)
    return compiled(*operands), compiled.as_text()


def permuted(text, mesh_shape):
    """Bytes of the permutations of a compiled program, by axes; there is nothing else in it."""
    found = Counter()
    for operand in census_of_text(text, mesh_shape, scalars=True).operands:
        assert operand.kind == "collective-permute"
        found[tuple(sorted(operand.axes)), operand.bytes] += operand.count
    return found


def exchanged(eqn, rule, strategies, mesh):
    """The same as the equation's row says it, over all strategies."""
    found, divided = Counter(), entry_for(eqn).divided
    for strategy in strategies if divided else ():
        for exchange in divided(eqn, rule, dict(strategy.factor_axes), mesh).exchanges:
            found[tuple(sorted(exchange.axes)), exchange.bytes] += exchange.count
    return found


def assert_local_form_is_right(name, number, mesh_shape, choose=lambda name, rule, strategies: strategies):
    mesh = LogicalMesh.of(mesh_shape)
    eqn, values = example_operands(name, number)
    rule = rule_for(eqn)
    strategies = choose(name, rule, strategies_of(rule, mesh))
    bound = eqn.primitive.bind(*(jnp.asarray(x) for x in values), **eqn.params)
    expected = bound if eqn.primitive.multiple_results else [bound]
    results, text = local_results(eqn, rule, strategies, values, mesh)
    assert permuted(text, mesh_shape) == exchanged(eqn, rule, strategies, mesh)
    for strategy, outs in zip(strategies, results, strict=True):
        for out, whole, layout in zip(outs, expected, strategy.outputs, strict=True):
            if is_opaque(jax.typeof(whole)):
                out, whole = jax.random.key_data(out), jax.random.key_data(whole)
                layout = Layout.replicated(whole.ndim)
            atol = 2e-5 * max(1.0, float(np.max(np.abs(whole)))) if jnp.issubdtype(whole.dtype, jnp.inexact) else 0.0
            assert_holds(np.asarray(out), np.asarray(whole), layout, mesh, atol=atol)


WITH_OPERANDS = [case for case in CASES if case[0] != "add_any"]
"""add_any is made by differentiation only; its operands are no arguments."""


LONG_TO_COMPILE = [case for case in WITH_OPERANDS if case[0] in ("attention", "attention_backward") and case[1]]
LONG_TO_COMPILE += [("attention_backward", 0), ("random_gamma", 0)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "number"), [case for case in WITH_OPERANDS if case not in LONG_TO_COMPILE])
def test_on_shards_the_operation_needs_no_collective_and_gives_what_the_strategy_promises(name, number):
    def choose(name, rule, strategies):
        return shared_among_operations(name, rule, one_of_each_pair(strategies))

    assert_local_form_is_right(name, number, (2, 2), choose)


def test_operations_that_work_by_elements_have_every_strategy_together():
    mesh = LogicalMesh.of((2, 2))
    rules = {
        name: rule_for(EXAMPLES[name][0].equation(name))
        for name in ("cos", "exp", "floor", "log", "sin", "sqrt", "tan")
    }
    assert len({str(rule) for rule in rules.values()}) == 1
    every = one_of_each_pair(strategies_of(rules["cos"], mesh))
    shares = [shared_among_operations(name, rule, every) for name, rule in rules.items()]
    assert all(0 < len(share) < len(every) / 2 for share in shares)
    assert {str(strategy) for share in shares for strategy in share} == {str(strategy) for strategy in every}
    dot = rule_for(EXAMPLES["dot_general"][0].equation("dot_general"))
    assert shared_among_operations("dot_general", dot, every) == every


def test_one_of_each_pair_of_strategies_stands_for_both():
    mesh = LogicalMesh.of((2, 2))
    for name in ("dot_general", "transpose", "reduce_max"):
        strategies = strategies_of(rule_for(EXAMPLES[name][0].equation(name)), mesh)
        chosen = one_of_each_pair(strategies)
        said = {renamed(strategy, axes) for strategy in chosen for axes in ((0, 1), (1, 0))}
        assert said == {renamed(strategy, (0, 1)) for strategy in strategies}
        assert len(strategies) / 2 <= len(chosen) < len(strategies) * 0.7


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), WITH_OPERANDS)
def test_on_shards_of_other_meshes_too(name, number):
    for mesh_shape in ((4,), (3,), (2, 2), (2, 4)):
        assert_local_form_is_right(name, number, mesh_shape)


# --- XLA's partitioner ------------------------------------------------------------------------------------------------


def promised(eqn, strategy, mesh):
    """All-reduces that the partial outputs of a strategy stand for, one per axis: (kind, axes, bytes)."""
    found = Counter()
    for var, layout in zip(eqn.outvars, strategy.outputs, strict=True):
        if layout.partial:
            size = layout.local_bytes(var.aval.shape, var.aval.dtype.itemsize, mesh)
            for axis in layout.partial_axes:
                found["all-reduce", (axis,), size] += 1
    return found


def inserted_by_xla(name, number, mesh_shape, choose=lambda name, rule, strategies: strategies):
    """(collectives that XLA inserts, those promised) over chosen strategies without partial operands, in one program."""
    mesh = LogicalMesh.of(mesh_shape)
    example = EXAMPLES[name][number]
    eqn, numbers = example.instance(name)
    alone = strategies_of(rule_for(eqn), mesh, exchanges=False)
    strategies = choose(name, rule_for(eqn), [s for s in alone if not any(la.partial for la in s.inputs)])
    places = [numbers.index(i) for i in range(len(example.args))]

    def sharding(layout):
        return NamedSharding(
            device_mesh(mesh_shape), PartitionSpec(*(mesh.names(axes) or None for axes in layout.dims))
        )

    def run(*operands):
        return [jax.tree.leaves(example.fun(*args)) for args in operands]

    arguments = [tuple(x for x in example.args) for _ in strategies]
    ins = tuple(tuple(sharding(s.inputs[i]) for i in places) for s in strategies)
    outs = [[sharding(la) for la in s.outputs] for s in strategies]
    text = jax.jit(run, in_shardings=ins, out_shardings=outs).lower(*arguments).compile(LESS_WORK).as_text()
    found = Counter()
    for operand in census_of_text(text, mesh_shape, scalars=True).operands:
        for axes in [(axis,) for axis in operand.axes] if operand.kind == "all-reduce" else [operand.axes]:
            found[operand.kind, axes, operand.bytes] += operand.count
    total = Counter()
    for strategy in strategies:
        total += promised(eqn, strategy, mesh)
    return found, total


BY_XLA = [case for case in WITH_OPERANDS if case not in XLA_DOES_WORSE and case[0] not in KEYS]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "number"), [case for case in BY_XLA if case[1] == 0])
def test_xla_inserts_exactly_the_promised_all_reduces(name, number):
    found, total = inserted_by_xla(name, number, (2, 2), shared_among_operations)
    assert found == total


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), BY_XLA)
def test_xla_inserts_exactly_the_promised_all_reduces_for_every_strategy(name, number):
    found, total = inserted_by_xla(name, number, (2, 2))
    assert found == total
