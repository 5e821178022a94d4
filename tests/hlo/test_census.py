"""The census reads what XLA really prints: programs compiled here, and texts for what the CPU never prints."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.hlo.census import Collective, collectives, mesh_axes_of

NAMES = ("a", "b", "c")
WHOLE = P()
MESHES = [(8,), (2, 4), (2, 2, 2)]
AXES_OF_MESHES = [
    (shape, axes)
    for shape in MESHES
    for count in range(1, len(shape) + 1)
    for axes in itertools.combinations(range(len(shape)), count)
]


def mesh_of(shape):
    return jax.sharding.Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), NAMES[: len(shape)])


def census(per_device, *args, shape, in_specs=WHOLE, out_specs=WHOLE):
    """Collectives of a per-device program under shard_map on a mesh of `shape`."""
    program = jax.shard_map(per_device, mesh=mesh_of(shape), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return collectives(jax.jit(program).lower(*args).compile().as_text(), num_devices=math.prod(shape))


def only(found):
    (collective,) = found
    return collective


def names(axes):
    return tuple(NAMES[axis] for axis in axes)


# --- programs compiled here -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axes"), AXES_OF_MESHES)
def test_an_all_reduce_counts_its_operand(shape, axes):
    found = only(census(lambda x: lax.psum(x, names(axes)), jnp.ones((16, 8)), shape=shape))
    assert (found.kind, found.operand_bytes, found.count) == ("all-reduce", (16 * 8 * 4,), 1)
    assert found.mesh_axes(shape) == axes
    assert found.group_size == math.prod(shape[axis] for axis in axes)


@pytest.mark.parametrize(("shape", "axes"), AXES_OF_MESHES)
def test_a_reduce_scatter_counts_its_input(shape, axes):
    found = only(census(lambda x: _scatter(x, names(axes)), jnp.ones((16, 8)), shape=shape, out_specs=P(names(axes))))
    assert (found.kind, found.operand_bytes) == ("reduce-scatter", (16 * 8 * 4,))
    assert found.mesh_axes(shape) == axes


@pytest.mark.parametrize(("shape", "axes"), AXES_OF_MESHES)
def test_an_all_gather_counts_its_result(shape, axes):
    gather = lambda x: lax.all_gather(x, names(axes), axis=0, tiled=True)  # noqa: E731
    found = only(census(gather, jnp.ones((16, 8)), shape=shape, in_specs=P(names(axes))))
    assert (found.kind, found.operand_bytes) == ("all-gather", (16 * 8 * 4,))
    assert found.mesh_axes(shape) == axes


@pytest.mark.parametrize(("shape", "axes"), AXES_OF_MESHES)
def test_an_all_to_all_counts_its_operand_once(shape, axes):
    """XLA on CPU splits the operand into one piece per device of the group: still one operand."""
    exchange = lambda x: lax.all_to_all(x, names(axes), 0, 1, tiled=True)  # noqa: E731
    ways = math.prod(shape[axis] for axis in axes)
    specs = {"in_specs": P(None, names(axes)), "out_specs": P(names(axes))}
    found = only(census(exchange, jnp.ones((16, 16)), shape=shape, **specs))
    assert (found.kind, found.operand_bytes) == ("all-to-all", (16 * 16 * 4 // ways,))
    assert found.mesh_axes(shape) == axes


@pytest.mark.parametrize(("shape", "axis"), [(shape, axis) for shape in MESHES for axis in range(len(shape))])
def test_a_permutation_counts_its_operand_and_names_the_axis_it_moves_along(shape, axis):
    ring = [(i, (i + 1) % shape[axis]) for i in range(shape[axis])]
    found = only(census(lambda x: lax.ppermute(x, NAMES[axis], ring), jnp.ones((16, 8)), shape=shape))
    assert (found.kind, found.operand_bytes) == ("collective-permute", (16 * 8 * 4,))
    assert found.mesh_axes(shape) == (axis,)
    assert found.group_size == shape[axis]
    assert len(found.pairs) == 8


def test_a_permutation_of_some_devices_keeps_its_pairs():
    found = only(census(lambda x: lax.ppermute(x, "b", [(0, 1), (2, 3)]), jnp.ones((4,)), shape=(2, 4)))
    assert found.pairs == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.mesh_axes((2, 4)) == (1,)


def test_combined_all_reduces_count_every_operand():
    sizes = (5, 16, 256, 7)
    found = census(lambda *xs: lax.psum(xs, "b"), *(jnp.ones((n,)) for n in sizes), shape=(2, 4))
    assert sum(c.operands for c in found) == len(sizes)
    assert sorted(n for c in found for n in c.operand_bytes) == sorted(4 * n for n in sizes)
    assert sum(c.bytes for c in found) == 4 * sum(sizes)


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("float32", 4), ("int8", 1), ("int32", 4), ("float16", 2), ("bool", 1)]
)
def test_bytes_follow_the_element_type(dtype, itemsize):
    found = only(census(lambda x: lax.all_gather(x, "a"), jnp.ones((32,), dtype), shape=(8,), in_specs=P("a")))
    assert found.bytes == 32 * itemsize


def test_a_scan_multiplies_by_its_trips():
    def layer(carry, _):
        return lax.psum(jnp.sin(carry), "b"), None

    found = only(census(lambda x: lax.scan(layer, x, None, length=6)[0], jnp.ones((4, 4)), shape=(2, 4)))
    assert (found.count, found.bytes, found.count_is_exact) == (6, 64, True)


def test_nested_loops_multiply_their_trips():
    def inner(carry, _):
        return lax.psum(carry, "a") * 0.5, None

    def outer(carry, _):
        carry = lax.psum(jnp.sin(carry), "b")
        return lax.scan(inner, carry, None, length=3)[0], None

    found = census(lambda x: lax.scan(outer, x, None, length=5)[0], jnp.ones((4, 4)), shape=(2, 4))
    assert {(c.mesh_axes((2, 4)), c.count) for c in found} == {((0,), 15), ((1,), 5)}


def test_the_backward_pass_of_a_scan_multiplies_too():
    def loss(x):
        return lax.scan(lambda c, _: (jnp.tanh(lax.psum(c, "a")), None), x, None, length=4)[0].sum()

    found = census(jax.grad(loss), jnp.ones((4, 4)), shape=(8,))
    assert sum(c.count for c in found if c.bytes == 64) == 8


def test_a_loop_that_counts_up_is_counted_from_its_condition():
    def body(carry):
        return carry[0] + 1, lax.psum(jnp.sin(carry[1]), "a")

    def loop(x):
        return lax.while_loop(lambda carry: carry[0] < 7, body, (0, x))[1]

    program = jax.jit(jax.shard_map(loop, mesh=mesh_of((8,)), in_specs=P(), out_specs=P(), check_vma=False))
    unoptimised = program.lower(jnp.ones((4,))).as_text(dialect="hlo")
    assert "known_trip_count" not in unoptimised
    found = only(collectives(unoptimised, num_devices=8))
    assert (found.count, found.count_is_exact) == (7, True)


@pytest.mark.parametrize(("start", "step"), [(3, 1), (0, 2)])
def test_a_loop_that_does_not_count_every_trip_is_not_guessed(start, step):
    def body(carry):
        return carry[0] + step, lax.psum(jnp.sin(carry[1]), "a")

    def loop(x):
        return lax.while_loop(lambda carry: carry[0] < 7, body, (start, x))[1]

    program = jax.jit(jax.shard_map(loop, mesh=mesh_of((8,)), in_specs=P(), out_specs=P(), check_vma=False))
    found = only(collectives(program.lower(jnp.ones((4,))).as_text(dialect="hlo"), num_devices=8))
    assert (found.count, found.count_is_exact) == (1, False)


def test_a_loop_until_convergence_counts_once_and_says_so():
    def loop(x):
        return lax.while_loop(lambda x: x.sum() < 7, lambda x: lax.psum(jnp.sin(x) + 1, "a"), x)

    found = only(census(loop, jnp.ones((4, 4)), shape=(8,)))
    assert (found.count, found.count_is_exact) == (1, False)


def test_each_branch_of_a_conditional_counts():
    def branches(x):
        return lax.cond(x[0] > 0, lambda x: lax.psum(x, "b"), lambda x: lax.all_gather(x, "b", tiled=True)[:16], x)

    found = census(branches, jnp.ones((16,)), shape=(2, 4))
    assert {(c.kind, c.bytes) for c in found} == {("all-reduce", 64), ("all-gather", 256)}


def test_collectives_that_xla_chose_itself_are_read_too():
    """Sharding propagation writes its groups in other ways than shard_map, and differently in each version."""
    mesh = mesh_of((2, 4))

    def sharded(*spec):
        return NamedSharding(mesh, P(*spec))

    product = jax.jit(jnp.dot, in_shardings=(sharded("a", "b"), sharded("b")), out_shardings=sharded("a"))
    text = product.lower(jnp.ones((16, 16)), jnp.ones((16, 16))).compile().as_text()
    found = only(collectives(text, num_devices=8))
    assert (found.kind, found.bytes, found.mesh_axes((2, 4))) == ("all-reduce", 8 * 16 * 4, (1,))

    relayout = jax.jit(lambda x: x * 2, in_shardings=sharded("a", "b"), out_shardings=sharded("b", "a"))
    found = collectives(relayout.lower(jnp.ones((16, 16))).compile().as_text(), num_devices=8)
    assert {c.kind for c in found} == {"all-to-all", "collective-permute"}
    assert {c.groups for c in found if c.kind == "all-to-all"} == {((0, 1), (2, 3), (4, 5), (6, 7))}


def test_op_names_lead_back_to_the_user():
    def step(x):
        with jax.named_scope("attention"):
            return lax.psum(x, "a")

    assert "attention" in only(census(step, jnp.ones((4,)), shape=(8,))).op_name


def test_a_program_without_collectives_has_none():
    assert census(lambda x: x + 1, jnp.ones((16,)), shape=(8,)) == ()


# --- notations that XLA prints elsewhere, or for other programs -----------------------------------------------------


def module(*instructions, more=""):
    """An HLO module whose entry holds `instructions` on f32[64] parameters."""
    body = "\n".join(f"  {line}" for line in instructions)
    return f"""HloModule step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}
{more}
ENTRY %main (p: f32[64], q: f32[32]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  %q = f32[32]{{0}} parameter(1)
{body}
}}
"""


def read(*instructions, more="", num_devices=8):
    return collectives(module(*instructions, more=more), num_devices=num_devices)


ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ROWS),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("[4,2]<=[2,2,2]T(2,1,0)", ((0, 4), (2, 6), (1, 5), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {}", tuple((i,) for i in range(8))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", COLUMNS),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_every_notation_of_groups_is_read(notation, groups):
    line = f"ROOT %r = f32[64]{{0}} all-reduce(%p), channel_id=1, replica_groups={notation}, to_apply=%add"
    found = only(read(line))
    assert {frozenset(group) for group in found.groups} == {frozenset(group) for group in groups}
    assert found.bytes == 256


def test_groups_left_out_are_all_devices():
    assert only(read("ROOT %r = f32[64]{0} all-reduce(%p), to_apply=%add", num_devices=4)).groups == ((0, 1, 2, 3),)


def test_an_unknown_notation_of_groups_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match=r"notation not known here.*new<8>"):
        read("ROOT %r = f32[64]{0} all-reduce(%p), replica_groups=new<8>, to_apply=%add")


def test_text_that_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        collectives("module @jit_step { }", num_devices=8)


GROUPS = "channel_id=1, replica_groups=[2,4]<=[8]"


def test_asynchronous_pairs_count_once():
    found = read(
        f"%ar = f32[64]{{0}} all-reduce-start(%p), {GROUPS}, to_apply=%add",
        "%ar-done = f32[64]{0} all-reduce-done(%ar)",
        f"%ars = (f32[64]{{0}}, f32[32]{{0}}) all-reduce-start(%p, %q), {GROUPS}, to_apply=%add",
        "%ars-done = (f32[64]{0}, f32[32]{0}) all-reduce-done(%ars)",
        f"%ag = (f32[64]{{0}}, f32[256]{{0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}",
        "%ag-done = f32[256]{0} all-gather-done(%ag)",
        f"%ags = ((f32[64], f32[32]), (f32[256], f32[128])) all-gather-start(%p, %q), {GROUPS}, dimensions={{0}}",
        "%ags-done = (f32[256]{0}, f32[128]{0}) all-gather-done(%ags)",
        "%cp = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
        "%cp-done = f32[64]{0} collective-permute-done(%cp)",
        f"%rs = ((f32[64]{{0}}), f32[16]{{0}}) reduce-scatter-start(%p), {GROUPS}, dimensions={{0}}, to_apply=%add",
        "%rs-update = ((f32[64]{0}), f32[16]{0}) reduce-scatter-update(%rs)",
        "ROOT %rs-done = f32[16]{0} reduce-scatter-done(%rs-update)",
    )
    assert [(c.kind, c.operand_bytes) for c in found] == [
        ("all-reduce", (256,)),
        ("all-reduce", (256, 128)),
        ("all-gather", (1024,)),
        ("all-gather", (1024, 512)),
        ("collective-permute", (256,)),
        ("reduce-scatter", (256,)),
    ]


def test_a_wrapped_asynchronous_collective_counts_once():
    wrapped = f"""
%async_computation (x.1: f32[64]) -> f32[16] {{
  %x.1 = f32[64]{{0}} parameter(0)
  ROOT %scatter = f32[16]{{0}} reduce-scatter(%x.1), {GROUPS}, dimensions={{0}}, to_apply=%add
}}, execution_thread="parallel"
"""
    found = read(
        "%start = ((f32[64]{0}), f32[16]{0}, s32[]) async-start(%p), calls=%async_computation",
        "%update = ((f32[64]{0}), f32[16]{0}, s32[]) async-update(%start), calls=%async_computation",
        "ROOT %done = f32[16]{0} async-done(%update), calls=%async_computation",
        more=wrapped,
    )
    assert (only(found).kind, only(found).bytes, only(found).count) == ("reduce-scatter", 256, 1)


def test_both_forms_of_all_to_all_are_one_operand():
    found = read(
        f"%whole = f32[64]{{0}} all-to-all(%p), {GROUPS}, dimensions={{0}}",
        f"%pieces = (f32[16], f32[16], f32[16], /*index=3*/f32[16]) all-to-all(%a, %b, %c, %d), {GROUPS}",
        f"ROOT %started = ((f32[64]{{0}}), f32[64]{{0}}) all-to-all-start(%p), {GROUPS}, dimensions={{0}}",
    )
    assert [(c.kind, c.operand_bytes) for c in found] == [("all-to-all", (256,))] * 3


def test_layouts_with_tiles_and_small_element_types_are_read():
    found = read(
        f"%tiled = bf16[8,128]{{1,0:T(8,128)(2,1)S(1)}} all-reduce(%p), {GROUPS}, to_apply=%add",
        f"%fp8 = f8e4m3fn[64]{{0}} all-gather(%p), {GROUPS}, dimensions={{0}}",
        f"%int4 = s4[63]{{0}} all-gather(%p), {GROUPS}, dimensions={{0}}",
        f"%complex = c64[4]{{0}} all-gather(%p), {GROUPS}, dimensions={{0}}",
        f"ROOT %mask = pred[64]{{0}} all-gather(%p), {GROUPS}, dimensions={{0}}",
    )
    assert [c.bytes for c in found] == [2048, 64, 32, 32, 64]


def test_names_without_percent_signs_and_typed_operands_are_read():
    line = "ROOT r = f32[64]{0} all-reduce(f32[64]{0} p), replica_groups={{0,1}}, to_apply=add"
    assert only(collectives(module(line).replace("%", ""), num_devices=2)).groups == ((0, 1),)


def test_text_in_metadata_is_not_mistaken_for_a_collective():
    line = 'ROOT %r = f32[64]{0} copy(%p), metadata={op_name="all-reduce(x), replica_groups={}" source_line=3}'
    assert read(line) == ()


# --- groups -> mesh axes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axes"), AXES_OF_MESHES)
def test_groups_lead_back_to_the_axes_that_made_them(shape, axes):
    devices = np.arange(8).reshape(shape)
    groups = np.moveaxis(devices, axes, range(-len(axes), 0)).reshape(-1, math.prod(shape[a] for a in axes))
    shuffled = [tuple(reversed(group)) for group in reversed(groups.tolist())]
    assert mesh_axes_of(shuffled, shape) == axes


def test_axes_of_size_one_are_never_named():
    assert mesh_axes_of([(0, 1, 2, 3)], (1, 4)) == (1,)
    assert mesh_axes_of([(0, 1, 2, 3)], (4, 1)) == (0,)
    assert mesh_axes_of([(0,), (1,)], (2, 1)) == ()


def test_groups_that_cut_an_axis_have_no_mesh_axes():
    assert mesh_axes_of([(0, 1), (2, 3), (4, 5), (6, 7)], (2, 4)) is None
    assert mesh_axes_of([(0, 1)], (2, 4)) is None


def test_a_collective_sums_its_operands():
    collective = Collective(kind="all-reduce", operand_bytes=(4, 8), groups=((0, 1), (2, 3)), count=3)
    assert (collective.operands, collective.bytes, collective.group_size) == (2, 12, 2)


def _scatter(x, axes):
    return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)
