"""What fused kernels read and write, counted by hand; what a step keeps from forward to backward."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar.cost_model.hardware import preset
from autopar.intra_op.choices import kernels
from autopar.intra_op.choices.catalogue import Catalogues
from autopar.intra_op.choices.kernels import traffic_of
from autopar.intra_op.choices.options import PlannerOptions
from autopar.intra_op.choices.tuning import TUNING, Tuning
from autopar.intra_op.planner import plan_step
from autopar.intra_op.request import PlanRequest
from autopar.layouts.constraints import Constraints, Rule
from autopar.layouts.mesh import LogicalMesh
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.from_jaxpr import program_of
from autopar.program.trace import trace
from autopar.simulate.closed_forms.job_prediction import Part
from autopar.simulate.closed_forms.layer_split import LayerSplit
from autopar.simulate.closed_forms.memory import ActivationShape, layer_activation_bytes
from autopar.simulate.closed_forms.transformer_shape import TransformerShape
from autopar.simulate.model_parts import part_step
from autopar.simulate.part_plans import plan_part

CLUSTER = preset("dgx-a100-80gb")
ROWS, WIDTH = 256, 512
FULL = 4 * ROWS * WIDTH
"""Bytes of one float32 matrix of the examples."""


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def moved(function, *arguments):
    """(bytes that kernels of pointwise operations read and write, how many there are) in a program."""
    found = [pair for is_product, *pair in listed(function, *arguments) if not is_product]
    return sum(size for size, _ in found), sum(kernels for _, kernels in found)


def product_bytes(function, *arguments):
    """Bytes that each product reads and writes."""
    return [size for is_product, size, _ in listed(function, *arguments) if is_product]


def listed(function, *arguments):
    """(whether it is a product, its bytes, kernels that it starts) for each equation of a program."""
    program, _ = program_of(jax.make_jaxpr(function)(*arguments))
    found = []
    for eqn, traffic in traffic_of(program).items():
        parts = (*zip(traffic.reads, eqn.invars, strict=True), *zip(traffic.writes, eqn.outvars, strict=True))
        size = sum(part * v.aval.size * v.aval.dtype.itemsize for part, v in parts if part)
        found.append((eqn.primitive.name == "dot_general", size, traffic.kernels))
    return found


X, SQUARE = array(ROWS, WIDTH), array(WIDTH, WIDTH)


def test_a_chain_reads_what_it_takes_and_writes_what_it_gives_once():
    assert moved(lambda x: jnp.exp(jnp.tanh(x) * 2 + 1), X) == (2 * FULL, 1)


def test_a_value_that_two_operations_read_is_read_once_by_their_kernel():
    assert moved(lambda x, y: (x * y + x, jnp.sin(x)), X, X) == (4 * FULL, 1)


def test_what_is_computed_again_where_it_is_read_is_no_kernel_by_itself():
    """As a moment of Adam, decayed before its gradient is there: it is read once, by the kernel that adds the gradient."""

    def moment(before, x, y):
        gradient = x.T @ y
        return 0.9 * before + gradient / jnp.sqrt(jnp.sum(gradient**2))

    found, kernels = moved(moment, SQUARE, X, X)
    assert kernels == 3  # the transposed operand, the norm, the sum
    assert found == pytest.approx(2 * FULL + 4 * 4 * SQUARE.size, rel=1e-4)


@pytest.mark.parametrize("fuses", [True, False])
def test_random_bits_take_time_to_draw_beside_what_is_written(fuses):
    device = dataclasses.replace(
        CLUSTER.device, memory_bytes_per_s=1e30, launch_s=0.0, random_s_per_byte=1e-12, fuses=fuses
    )
    cluster = dataclasses.replace(CLUSTER, device=device)
    program, _ = program_of(jax.make_jaxpr(lambda key: jax.random.bernoulli(key, 0.9, X.shape))(jax.random.key(0)))
    catalogue = Catalogues().of(LogicalMesh.of((1,)), cluster, PlannerOptions())
    traffic = traffic_of(program) if fuses else {}
    taken_s = sum(
        sum(catalogue.whole_seconds(eqn, traffic=traffic.get(eqn))) for eqn in program.walk() if not eqn.regions
    )
    assert taken_s == pytest.approx(FULL * 1e-12, rel=1e-6)


def test_softmax_of_rows_that_fit_is_one_kernel():
    assert moved(lambda x: jax.nn.softmax(x), X) == (2 * FULL, 1)


def test_a_row_that_does_not_fit_is_read_again_by_every_kernel_after_its_sums():
    """Maximum, sum and quotient: three kernels, each of which reads the row; the exponential is computed again."""
    wide = array(4, TUNING.row_bytes // 4 + 1)
    size = 4 * wide.size
    found, kernels = moved(lambda x: jax.nn.softmax(x), wide)
    assert kernels == 3
    assert found == pytest.approx(4 * size, rel=1e-3)


@pytest.mark.parametrize(("row_bytes", "kernels"), [(4 * WIDTH, 1), (4 * WIDTH - 1, 3)])
def test_how_long_a_row_fits_is_tuned(row_bytes, kernels):
    program, _ = program_of(jax.make_jaxpr(jax.nn.softmax)(X))
    traffic = traffic_of(program, Tuning(row_bytes=row_bytes))
    assert sum(one.kernels for one in traffic.values()) == kernels


def test_sums_over_examples_end_a_kernel_but_their_input_is_read_with_the_rest():
    found, kernels = moved(lambda x: (jnp.sum(x * 2, axis=0), x * 3), X)
    assert (found, kernels) == (2 * FULL + 4 * WIDTH, 1)
    found, kernels = moved(lambda x: x - jnp.sum(x, axis=0), X)
    assert (found, kernels) == (3 * FULL + 2 * 4 * WIDTH, 2)


def test_what_a_product_reads_is_written_and_what_it_writes_is_read():
    found, kernels = moved(lambda x, w: jnp.tanh(jnp.tanh(x) @ w), X, SQUARE)
    assert (found, kernels) == (4 * FULL, 2)


def test_a_product_whose_result_is_only_added_to_something_adds_it_itself():
    """An accumulated gradient: float32 is read and written by the product, and nothing is left for another kernel."""

    def accumulated(total, x, dy):
        return total + (x.T @ dy).astype(jnp.float32)

    half = array(ROWS, WIDTH, dtype=jnp.float16)
    assert moved(accumulated, SQUARE, half, half) == (2 * 2 * ROWS * WIDTH, 1)  # the transpose of x alone
    assert product_bytes(accumulated, SQUARE, half, half) == [2 * 2 * ROWS * WIDTH + 2 * 4 * WIDTH * WIDTH]


def test_a_product_that_others_read_too_is_added_by_a_kernel():
    def both(total, x, w):
        y = x @ w
        return total + y, jnp.sin(y)

    assert moved(both, X, X, SQUARE) == (4 * FULL, 1)


def test_backward_computes_forward_values_again_where_that_moves_less():
    """Of tanh only its argument is read again: the three values between are not written for it."""

    def step(x, w, dy):
        y, back = jax.vjp(lambda x: jnp.exp(jnp.tanh(x @ w) * 3), x)
        return y, back(dy)[0]

    found, _ = moved(step, X, SQUARE, X)
    # forward reads the product and writes y; backward reads the product and dy and writes what the other product reads
    assert found <= 5 * FULL


def test_random_masks_are_written_for_backward_and_not_drawn_again():
    def step(key, x, w, dy):
        y, back = jax.vjp(lambda x: jax.random.bernoulli(key, 0.5, x.shape) * (x @ w), x)
        return y, back(dy @ w)[0]

    key = array(2, dtype=jnp.uint32)
    found, _ = moved(step, key, X, SQUARE, X)
    # products and results four times, the mask, a byte each, written once and read by both directions
    assert found == pytest.approx(4 * FULL + 3 * ROWS * WIDTH, rel=0.01)


HIDDEN, SEQ, SAMPLES, HEADS, TENSOR = 4096, 1024, 4, 32, 4
SHAPE = TransformerShape(
    family="gpt", layers=1, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, ffn_hidden=4 * HIDDEN, vocab=51200, seq_len=SEQ
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_planned_layer_keeps_what_korthikanti_count(sequence_parallel, recompute):
    """34 s b h + 5 a s^2 b and its divided forms, found in the program of a layer and not by formula."""
    split = LayerSplit(samples=SAMPLES, tensor_ranks=TENSOR, sequence_parallel=sequence_parallel, recompute=recompute)
    part = Part(kind="plain", shape=SHAPE, split=split, data_ranks=1)
    found = plan_part(CLUSTER, part, part_step(part, zero_stage=0, precision="fp16"), zero_stage=0)
    divided = TENSOR if sequence_parallel else 1
    everything = layer_activation_bytes(
        ActivationShape(
            seq_len=SEQ,
            samples=SAMPLES,
            hidden=HIDDEN,
            heads=HEADS,
            ffn_hidden=4 * HIDDEN,
            tensor_ranks=TENSOR,
            sequence_parallel=sequence_parallel,
        )
    )
    if recompute == "full":
        assert found.kept_bytes == pytest.approx(2 * SEQ * SAMPLES * HIDDEN / divided, rel=0.01)
        assert found.kept_bytes + found.again_bytes == pytest.approx(everything, rel=0.01)
    else:
        assert found.scores_bytes == pytest.approx(5 * HEADS * SEQ**2 * SAMPLES / TENSOR, rel=0.01)
        assert found.kept_bytes + found.scores_bytes == pytest.approx(everything, rel=0.01)


def test_a_held_input_is_used_in_the_layout_in_which_it_comes():
    """Two products of whole examples: splitting them would be cheaper, and is not possible where the matrix stays split."""
    signature = CallSignature(
        lambda state: ({"x": jnp.tanh(state["x"] @ state["w"]), "w": state["w"]}, {}), (), (), "auto"
    )
    state = {"x": array(8192, 64), "w": array(64, 64)}
    traced = trace(signature, bind_arguments(signature, (state,), {}))
    mesh = LogicalMesh.of({"data": 4})

    rules = Constraints(
        tuple(Rule(glob=k, layout=v) for k, v in {"state/w": P(None, "data"), "state/x": P("data", None)}.items())
    )
    number = [leaf.path for leaf in traced.inputs].index("state/w")

    def gathered(held):
        options = PlannerOptions(held=held)
        plan = plan_step(
            traced,
            PlanRequest(meshes=(mesh,), cluster=CLUSTER, memory_limit_bytes=None, constraints=rules, options=options),
        ).plan
        return {item.operand for item in plan.collectives}

    assert gathered(frozenset()) == {"float32[64,64]"}
    assert gathered(frozenset({number})) == {"float32[8192,64]"}


@pytest.mark.parametrize("blocks", [10, 40])
def test_the_work_for_residual_blocks_grows_with_their_number(blocks, monkeypatch):
    """A block after whose sum there is a norm reads that sum several times: there are more paths than one can follow."""

    def step(x, weights, bias):
        for w in weights:
            x = x + (x @ w + bias)
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        return (x * x).sum()

    x, w = array(32, 64), array(64, 64)
    program, _ = program_of(jax.make_jaxpr(jax.grad(step))(x, [w] * blocks, array(64)))
    real, asked = kernels.entry_for, [0]

    def counted(eqn):
        asked[0] += 1
        assert asked[0] < 150 * len(program.equations)
        return real(eqn)

    monkeypatch.setattr(kernels, "entry_for", counted)
    assert len(traffic_of(program)) == len(program.equations)


def test_neither_of_two_products_that_run_side_by_side_adds_the_other():
    """A product adds what is there before it starts; here a kernel reads both, and writes the sum."""
    assert moved(lambda x, y, w: x @ w + y @ w, array(ROWS, WIDTH), array(ROWS, WIDTH), array(WIDTH, WIDTH)) == (
        3 * FULL,
        1,
    )
