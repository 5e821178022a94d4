"""What a device keeps depends on whose compiler compiles for it: that for GPUs keeps less than that for CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost_model.hardware import PRESETS
from autopar.intra_op.choices.graph import build_graph
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.lowering.assignment import assign
from autopar.intra_op.memory.compilers import XLA_CPU, XLA_GPU, compiler_of
from autopar.intra_op.memory.device_operations import Kind
from autopar.intra_op.memory.device_program import device_program
from autopar.intra_op.memory.footprint import footprint_of
from autopar.intra_op.memory.model import MemoryModel
from autopar.layouts.mesh import LogicalMesh
from autopar.models import registry
from autopar.program.from_jaxpr import program_of

SQUARE = jax.ShapeDtypeStruct((128, 128), np.float32)


def graph_of(function, *shapes, devices=1):
    program, _ = program_of(jax.make_jaxpr(function)(*shapes))
    inputs = [None] * len(program.invars)
    outputs = [None] * len(program.outvars)
    mesh = LogicalMesh.of((devices,))
    return build_graph(program, mesh, PRESETS["cpu"], PlannerOptions(), input_layouts=inputs, output_layouts=outputs)


def kept(function, compiler, *shapes):
    """Names of the values with buffers, without the results, in the order in which they are made."""
    graph = graph_of(function, *shapes)
    program = device_program(graph, [f"input {i}" for i in range(len(shapes))], None, compiler)
    spans = footprint_of(program.block, program.values, elsewhere=frozenset(program.outputs)).spans
    return [program.values[span.value].name.split(" (")[0] for span in sorted(spans, key=lambda s: s.first)]


def drops(key, x, y):
    """Dropout, whose mask forward reads, and later backward."""
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(mask, jnp.where(mask, x, 0.0) @ y, 0.0) @ y


def normalizes(x, y):
    return x - jnp.sum(x * y, axis=0, keepdims=True)


def reuses_what_is_costly(x, y):
    z = jnp.exp(x)
    return jnp.sum(z * y, axis=0), jnp.sum(z, axis=1)


def turns(x, y):
    batched = jnp.einsum("bij,jbk->bik", x.reshape(8, 16, 128), y.reshape(128, 8, 16))
    return batched * 2


@pytest.mark.parametrize(
    ("function", "on_cpus", "on_gpus"),
    [
        (reuses_what_is_costly, ["exp"], []),
        (turns, ["reshape", "dot_general"], ["dot_general"]),
    ],
)
def test_on_gpus_what_is_costly_is_computed_again_and_products_read_operands_as_they_lie(function, on_cpus, on_gpus):
    assert kept(function, XLA_CPU, SQUARE, SQUARE) == on_cpus
    assert kept(function, XLA_GPU, SQUARE, SQUARE) == on_gpus


def test_on_gpus_a_large_reduction_reads_what_leads_to_it_without_a_buffer():
    """On CPUs its library reads what repeats a smaller value from a buffer."""

    def of_repeated(x, row):
        return jnp.sum(jnp.tanh(x @ x) * jnp.broadcast_to(row, x.shape), axis=0), jnp.broadcast_to(row, x.shape) + x

    row = jax.ShapeDtypeStruct((1, 128), np.float32)
    assert "broadcast_in_dim" in "".join(kept(of_repeated, XLA_CPU, SQUARE, row))
    assert "broadcast_in_dim" not in "".join(kept(of_repeated, XLA_GPU, SQUARE, row))


def test_on_gpus_of_random_bits_the_mask_is_kept_that_is_made_of_them():
    """On CPUs the bits are, in two halves of a counter, which are twice as wide."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    kept_of = {}
    for compiler in (XLA_CPU, XLA_GPU):
        program = device_program(graph_of(drops, key, SQUARE, SQUARE), ["key", "x", "y"], None, compiler)
        spans = footprint_of(program.block, program.values, elsewhere=frozenset(program.outputs)).spans
        kept_of[compiler.platform] = [program.values[span.value] for span in spans]
    widest = max(value.bytes for value in kept_of["cpu"] if value.name.startswith("random"))
    assert widest == 8 * 128 * 128
    assert not [value for value in kept_of["gpu"] if value.name.startswith("random")]
    assert [value.bytes for value in kept_of["gpu"] if value.dtype == "bool"] == [128 * 128]


def reads_twice(function):
    """A result that two products read, through different work, the one after the other."""

    def program(x, y):
        made = function(x @ y)
        return (jnp.dot(made + y, y) * made) @ y

    return program


@pytest.mark.parametrize(
    ("function", "dtype", "cluster", "is_kept"),
    [
        (jnp.tanh, np.float32, "dgx-a100-80gb", True),
        (jnp.tanh, np.float32, "p3.16xlarge", False),
        (jnp.tanh, np.float32, "dgx-h100", False),
        (jnp.tanh, jnp.bfloat16, "dgx-h100", True),
        (jnp.tanh, np.float16, "p3.16xlarge", True),
        (jax.lax.erfc, jnp.bfloat16, "dgx-h100", True),
        (jnp.exp, np.float32, "dgx-a100-80gb", False),
    ],
)
def test_what_is_dear_is_kept_where_a_device_reads_it_sooner_than_it_computes_it(function, dtype, cluster, is_kept):
    """As XLA's compilers for V100, A100 and H100 decide; in bfloat16 the result is kept in float32, in which it is made."""
    square = jax.ShapeDtypeStruct((128, 128), dtype)
    program = device_program(
        graph_of(reads_twice(function), square, square), ["x", "y"], None, compiler_of(PRESETS[cluster].device)
    )
    spans = footprint_of(program.block, program.values, elsewhere=frozenset(program.outputs)).spans
    name = "erfc" if function is jax.lax.erfc else function.__name__
    found = [program.values[span.value] for span in spans if program.values[span.value].name.startswith(name)]
    assert [value.bytes for value in found] == ([128 * 128 * (2 if dtype == np.float16 else 4)] if is_kept else [])


def test_on_gpus_operations_run_in_the_order_of_the_program():
    """On CPUs products that wait for nothing run first, so that all of their results are there at once."""

    def chain(x, y):
        total = x
        for _ in range(6):
            y = jnp.dot(total, y)
            total = jnp.dot(total, jnp.dot(x, y) + 1.0)
        return total

    def gathers(x, *others):
        for other in others:
            x = jnp.dot(x, jnp.dot(other, other))
        return x

    def most(compiler):
        graph = graph_of(gathers, *[SQUARE] * 6)
        memory = MemoryModel(graph, input_names=["x"] * 6, aliased_outputs={}, compiler=compiler)
        return memory.peak([0] * len(graph.nodes))[0]

    assert kept(chain, XLA_GPU, SQUARE, SQUARE)
    assert most(XLA_GPU) < most(XLA_CPU)


def test_of_collectives_cpus_merge_all_reduces_and_gpus_others_too():
    kinds = {}
    for compiler in (XLA_CPU, XLA_GPU):
        graph = graph_of(
            lambda x, y: jnp.tanh(x @ y) @ y, *[jax.ShapeDtypeStruct((4096, 4096), np.float32)] * 2, devices=4
        )
        rng = np.random.default_rng(0)
        found = set()
        for _ in range(100):
            choice = [int(rng.integers(len(node.choices.strategies))) for node in graph.nodes]
            program = device_program(graph, ["x", "y"], assign(graph, choice), compiler)
            found |= {op.group[0] for op in program.block.operations if op.group is not None}
        kinds[compiler.platform] = found
    assert kinds == {"cpu": {"all-reduce"}, "gpu": {"all-gather", "all-reduce", "reduce-scatter"}}


@pytest.mark.parametrize("name", ["cpu", "dgx-h100", "p3.16xlarge", "tpu-v5e"])
def test_whose_compiler_it_is_follows_from_the_device(name):
    assert compiler_of(PRESETS[name].device).platform == ("cpu" if name == "cpu" else "gpu")


def test_a_plan_says_whose_compiler_its_memory_is_that_of_and_needs_less_on_gpus():
    model = registry.build("gpt", layers=2, hidden=64)
    shapes = jax.eval_shape(model.create_state, jax.random.key(0)), model.batch_shape()
    options = {"devices": 4, "mesh_shape": (4,), "num_stages": 1, "constraints": autopar.data_parallel()}
    plans = {
        name: autopar.parallelize(model.train_step, cluster=name, **options).plan(*shapes)
        for name in ("cpu", "dgx-a100-80gb")
    }
    assert {name: plan.compiler for name, plan in plans.items()} == {"cpu": "cpu", "dgx-a100-80gb": "gpu"}
    assert plans["dgx-a100-80gb"].peak_bytes < 0.9 * plans["cpu"].peak_bytes
    assert type(plans["cpu"]).from_json(plans["dgx-a100-80gb"].to_json()) == plans["dgx-a100-80gb"]


def test_every_kind_of_operation_is_run_in_some_way():
    assert {op.kind for op in _operations(XLA_GPU)} <= set(Kind)
    assert Kind.LIBRARY not in {op.kind for op in _operations(XLA_GPU)}
    assert Kind.LIBRARY in {op.kind for op in _operations(XLA_CPU)}


def _operations(compiler):
    return device_program(graph_of(normalizes, SQUARE, SQUARE), ["x", "y"], None, compiler).block.operations
