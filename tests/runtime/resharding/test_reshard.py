"""Arrays moved between meshes of the eight virtual devices equal their source and have the target's sharding."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autopar.compat import make_mesh
from autopar.errors import ArgumentError
from autopar.runtime.resharding.executables import make_cutters, make_joiners
from autopar.runtime.resharding.links import Links
from autopar.runtime.resharding.reshard import Resharder, reshard
from autopar.runtime.resharding.routes import Move, Route
from autopar.runtime.resharding.tiling import Tiling
from autopar.runtime.resharding.tuning import Tuning

# (source mesh, first source device) -> (target mesh, first target device)
PLACES = [
    ((2, 2), 0, (2, 2), 4),
    ((1, 4), 0, (2, 2), 4),
    ((4,), 0, (2,), 4),
    ((2,), 0, (4,), 4),
    ((1,), 0, (8,), 0),
    ((8,), 0, (1,), 3),
    ((2, 4), 0, (2, 4), 0),
    ((2, 4), 0, (4, 2), 0),
    ((4,), 0, (4,), 2),
    ((3,), 0, (2, 2), 4),
    ((2, 2), 0, (3,), 5),
    ((2, 3), 0, (3, 2), 2),
    ((1,), 2, (1,), 2),
]


WITHOUT_SLACK = Tuning(slack_bytes=0, call_bytes=0, message_bytes=0)


def sharding_on(mesh_shape, first_device, spec):
    size = math.prod(mesh_shape)
    devices = np.array(jax.devices()[first_device : first_device + size]).reshape(mesh_shape)
    return NamedSharding(make_mesh(devices, tuple("xyz"[: len(mesh_shape)])), spec)


def moved_from(sharding, value):
    return jax.device_put(value, sharding)


def prepared_for(shape, source, target, *, links=None):
    """A function that moves one array of float32."""
    resharder = Resharder([Move(tuple(shape), np.dtype(np.float32), source, target)], links=links)
    return lambda array: resharder([array])[0]


def numbers(shape, dtype=np.float32):
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def check(array, value, target):
    assert array.sharding.is_equivalent_to(target, value.ndim)
    assert array.sharding == target
    assert array.committed
    np.testing.assert_array_equal(np.asarray(array), value)


@st.composite
def specs(draw, mesh_shape, shape):
    """A spec whose axes divide the shape."""
    axes = draw(st.permutations(range(len(mesh_shape))))
    spec = [[] for _ in shape]
    left = list(shape)
    for axis in axes:
        dims = [dim for dim, size in enumerate(left) if size % mesh_shape[axis] == 0]
        dim = draw(st.sampled_from([None, *dims]))
        if dim is not None:
            spec[dim].append("xyz"[axis])
            left[dim] //= mesh_shape[axis]
    return P(*[tuple(names) or None for names in spec])


@st.composite
def moves(draw):
    source_mesh, source_first, target_mesh, target_first = draw(st.sampled_from(PLACES))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 8, 12, 24]), max_size=3)))
    source = sharding_on(source_mesh, source_first, draw(specs(source_mesh, shape)))
    target = sharding_on(target_mesh, target_first, draw(specs(target_mesh, shape)))
    return shape, source, target


def links_without_slack(move):
    source, target = Tiling.of_sharding(move.source, move.shape), Tiling.of_sharding(move.target, move.shape)
    nodes = Links.between(source, target).node_of
    return Links(nodes, WITHOUT_SLACK)


@given(moves(), st.booleans())
@settings(max_examples=100)
def test_a_moved_array_equals_its_source_and_has_the_target_sharding(move, exact):
    shape, source, target = move
    value = numbers(shape)
    array = moved_from(source, value)
    links = links_without_slack(Move.of(array, target)) if exact else None
    check(prepared_for(shape, source, target, links=links)(array), value, target)


ROUTES = [
    (sharding_on((4,), 0, P("x")), sharding_on((4,), 4, P("x")), "copy", False),
    (sharding_on((4,), 0, P("x")), sharding_on((4,), 4, P()), "copy", True),
    (sharding_on((2, 2), 0, P("x", "y")), sharding_on((2, 2), 4, P()), "copy", True),
    (sharding_on((4,), 0, P("x")), sharding_on((2,), 4, P("x")), "tiles", False),
    (sharding_on((4,), 0, P("x")), sharding_on((2,), 4, P()), "tiles", True),
    (sharding_on((4,), 0, P()), sharding_on((4,), 4, P()), "tiles", True),
    (sharding_on((4,), 0, P("x")), sharding_on((4,), 0, P(None, "x")), "tiles", False),
]


@pytest.mark.parametrize(
    ("target", "senders", "receivers"),
    [
        (sharding_on((2,), 4, P("x")), 0, 2),
        (sharding_on((8,), 0, P("x")), 4, 0),
        (sharding_on((3,), 4, P("x")), 2, 3),
    ],
    ids=["tiles joined", "tiles cut", "both"],
)
def test_programs_run_only_where_boxes_are_less_than_tiles(target, senders, receivers):
    """24 numbers on four devices: a box that is all that its sender has, or its receiver is to have, needs no program there."""
    route = Route(0, Move((24,), np.dtype(np.float32), sharding_on((4,), 0, P("x")), target), None)
    assert route.kind == "tiles"
    assert (len(make_cutters([route])), len(make_joiners([route]))) == (senders, receivers)


def test_nothing_is_sent_of_an_array_of_size_zero():
    move = Move((0, 4), np.dtype(np.int8), sharding_on((4,), 0, P()), sharding_on((2,), 4, P(None, "x")))
    route = Route(0, move, None)
    assert (route.kind, route.parcels) == ("empty", ())


@pytest.mark.parametrize(("source", "target", "kind", "gathers"), ROUTES)
def test_every_kind_of_plan_moves_a_large_array(source, target, kind, gathers):
    value = numbers((1024, 512))
    array = moved_from(source, value)
    prepared = Resharder([Move.of(array, target)])
    assert prepared.plans[0].kind == kind
    assert bool(prepared.plans[0].cuts) == gathers
    check(prepared([array])[0], value, target)


@pytest.mark.parametrize("source", [sharding_on((2,), 0, P("x")), sharding_on((2,), 0, P())], ids=["split", "whole"])
@pytest.mark.parametrize("rows", [6, 10])
def test_shares_of_a_tile_may_be_of_different_lengths(source, rows):
    """Each of four devices takes a share over the slow link, the last ones less or nothing, and all gather the whole."""
    value, target = numbers((rows, 512)), sharding_on((4,), 4, P())
    links = Links({device.id: device.id // 4 for device in jax.devices()}, WITHOUT_SLACK)
    array = moved_from(source, value)
    prepared = Resharder([Move.of(array, target)], links=links)
    assert [cut.chunk * 4 > rows for cut in prepared.plans[0].cuts] == [True]
    check(prepared([array])[0], value, target)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_keys_scalars_and_arrays_of_size_zero_move(place):
    source_mesh, source_first, target_mesh, target_first = place
    source, target = sharding_on(source_mesh, source_first, P()), sharding_on(target_mesh, target_first, P())
    check(reshard(moved_from(source, np.float32(3.5)), target), np.array(3.5, np.float32), target)
    check(reshard(moved_from(source, np.zeros((0, 4), np.int8)), target), np.zeros((0, 4), np.int8), target)
    keys = moved_from(source, jax.random.split(jax.random.key(7, impl="rbg"), 12))
    split = sharding_on(target_mesh, target_first, P("x"))
    for wanted in (target, split) if 12 % target_mesh[0] == 0 else (target,):
        moved = reshard(keys, wanted)
        assert moved.dtype == keys.dtype
        assert moved.sharding.is_equivalent_to(wanted, 1)
        np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, np.uint32, np.complex64, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4]
)
def test_every_number_format_moves(dtype):
    value = (np.arange(64).reshape(8, 8) % 7).astype(dtype)
    source, target = sharding_on((4,), 0, P("x")), sharding_on((2,), 4, P(None, "x"))
    moved = reshard(moved_from(source, value), target)
    assert moved.dtype == dtype
    np.testing.assert_array_equal(np.asarray(moved), value)


def test_an_array_of_one_device_moves_to_a_mesh():
    target = sharding_on((2, 2), 4, P("x", "y"))
    array = jax.device_put(numbers((4, 4)), SingleDeviceSharding(jax.devices()[1]))
    check(reshard(array, target), numbers((4, 4)), target)


def test_an_array_moves_to_another_kind_of_memory():
    source = sharding_on((4,), 0, P("x"))
    target = sharding_on((2,), 4, P(None, "x")).with_memory_kind("unpinned_host")
    array = reshard(moved_from(source, numbers((4, 4))), target)
    check(array, numbers((4, 4)), target)
    assert array.sharding.memory_kind == "unpinned_host"


BATCH = [
    ((4,), 0, P("x"), (2,), 4, P()),
    ((2, 2), 0, P("x", "y"), (2, 2), 4, P("x", "y")),
    ((2, 2), 0, P("x", "y"), (2, 2), 4, P("y", "x")),
    ((4,), 0, P("x"), (4,), 4, P()),
    ((4,), 0, P("x"), (3,), 5, P(None, "x")),
    ((4,), 0, P("x"), (4,), 0, P(None, "x")),
    ((4,), 0, P("x"), (4,), 0, P("x")),
]


def batch_of(count):
    """Arrays of different sizes with all the routes of BATCH."""
    moves, values = [], []
    for number in range(count):
        source_mesh, source_first, source_spec, target_mesh, target_first, target_spec = BATCH[number % len(BATCH)]
        shape = (12 * (1 + 30 * number), 24)
        source = sharding_on(source_mesh, source_first, source_spec)
        target = sharding_on(target_mesh, target_first, target_spec)
        values.append(moved_from(source, numbers(shape)))
        moves.append(Move.of(values[-1], target))
    return moves, values


def test_a_batch_of_arrays_moves_in_one_call_of_device_put(monkeypatch):
    moves, values = batch_of(10)
    prepared = Resharder(moves)
    assert {plan.kind for plan in prepared.plans} == {"copy", "tiles"}
    puts, put = [], jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda arrays, *args, **options: puts.append(1) or put(arrays, *args, **options)
    )
    moved = prepared(values)
    assert puts == [1]
    for move, value, array in zip(moves, values, moved, strict=True):
        check(array, np.asarray(value), move.target)


def test_source_and_result_share_no_memory():
    moves, values = batch_of(len(BATCH))
    expected = [np.array(value) for value in values]
    prepared = Resharder(moves)
    for value, array in zip(expected, prepared(values), strict=True):
        array.delete()
        assert value.size
    moved = prepared(values)
    for value in values:
        value.delete()
    for move, value, array in zip(moves, expected, moved, strict=True):
        check(array, value, move.target)


def test_moving_the_same_array_twice_gives_two_arrays():
    target = sharding_on((4,), 0, P("x"))
    array = moved_from(target, numbers((8,)))
    first, second = reshard(array, target), reshard(array, target)
    first.delete()
    check(second, numbers((8,)), target)
    check(array, numbers((8,)), target)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", BATCH, ids=str)
def test_a_transfer_returns_before_its_operand_is_computed(case):
    source_mesh, source_first, source_spec, target_mesh, target_first, target_spec = case
    source = sharding_on(source_mesh, source_first, source_spec)
    target = sharding_on(target_mesh, target_first, target_spec)
    prepared, opened = prepared_for((48, 48), source, target), threading.Event()

    def held_back(array):
        opened.wait(60)
        return array

    compute = jax.jit(
        lambda array: jax.pure_callback(held_back, jax.typeof(array), jnp.tanh(array @ array)), out_shardings=source
    )
    start = moved_from(source, np.full((48, 48), 0.01, np.float32))
    opened.set()
    prepared(compute(start)).block_until_ready()
    opened.clear()
    pending = compute(start)
    moved = prepared(pending)
    assert not pending.is_ready()
    opened.set()
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(pending))


def test_one_resharder_serves_many_threads():
    source, target = sharding_on((4,), 0, P("x")), sharding_on((2,), 4, P(None, "x"))
    prepared = prepared_for((64, 64), source, target)
    arrays = [moved_from(source, numbers((64, 64)) + number) for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        moved = list(threads.map(prepared, arrays))
    for number, array in enumerate(moved):
        check(array, numbers((64, 64)) + number, target)


def test_an_array_that_a_transfer_was_not_prepared_for_is_refused():
    source, target = sharding_on((4,), 0, P("x")), sharding_on((2,), 4, P())
    prepared = prepared_for((8, 8), source, target)
    with pytest.raises(ArgumentError, match=r"array 0 to move is int32\(8, 8\).*prepared for.*float32.*\(8, 8\)"):
        prepared(moved_from(source, numbers((8, 8), np.int32)))
    with pytest.raises(ArgumentError, match=r"array 0 to move is float32\(8, 4\).*prepared for.*float32.*\(8, 8\)"):
        prepared(moved_from(source, numbers((8, 4))))
    with pytest.raises(ArgumentError, match=r"has the sharding .*P\(None, 'x'\).*prepared for .*prepare another"):
        prepared(moved_from(sharding_on((4,), 0, P(None, "x")), numbers((8, 8))))
