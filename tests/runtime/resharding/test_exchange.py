"""The program that moves tiles between processes, on the devices of one: every device gets the box that the plan says."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P

from autopar.runtime.resharding.exchange import Exchange, Passage
from autopar.runtime.resharding.routes import Move, Route
from tests.runtime.resharding.test_reshard import moves, numbers, sharding_on


def check_exchange(values, sources, targets):
    """All arrays in one program."""
    arrays = [jax.device_put(value, source) for value, source in zip(values, sources, strict=True)]
    batch = [Move.of(array, target) for array, target in zip(arrays, targets, strict=True)]
    routes = [Route(number, move, None) for number, move in enumerate(batch)]
    devices = {number: device for move in batch for number, device in move.devices.items()}
    exchange = Exchange([Passage(route.plan, route.frames, route.words.dtype) for route in routes], devices)
    held = [{shard.device.id: shard.data for shard in array.addressable_shards} for array in arrays]
    for _ in range(2):
        for value, route, tiles in zip(values, routes, exchange(held), strict=True):
            assert tiles.keys() == route.frames.keys()
            for device, box in zip(route.plan.between.devices, route.plan.between.boxes, strict=True):
                found = np.asarray(tiles[device])[tuple(slice(stop - start) for start, stop in box)]
                assert found.shape == tuple(stop - start for start, stop in box)
                np.testing.assert_array_equal(found, value[tuple(slice(*span) for span in box)])
    for array, value in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(np.asarray(array), value)


@settings(max_examples=25)
@given(moves())
def test_every_device_receives_what_the_plan_says(move):
    shape, source, target = move
    if 0 not in shape:
        check_exchange([numbers(shape)], [source], [target])


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, jnp.bfloat16, np.complex64], ids=str)
def test_numbers_of_every_kind_travel(dtype):
    value = (np.arange(64) % 5).reshape(8, 8).astype(dtype)
    check_exchange([value], [sharding_on((2, 2), 0, P("x", "y"))], [sharding_on((4,), 4, P(None, "x"))])


def test_arrays_of_several_shapes_travel_together_and_scalars_among_them():
    """The last has tiles of the first one's shape, and another type."""
    sources = [sharding_on((4,), 0, spec) for spec in (P("x"), P(), P(None, "x"), P("x"))]
    targets = [sharding_on((2, 2), 4, spec) for spec in (P(None, "y"), P(), P(), P("x"))]
    values = [numbers((8, 4)), np.float32(7), numbers((3, 8), np.int32), numbers((8, 4), np.int32)]
    check_exchange(values, sources, targets)


def test_all_processes_have_the_devices_in_one_order():
    """Those of a sharding are a set, which each process walks through in its own order."""
    source, target = sharding_on((2,), 4, P("x")), sharding_on((2,), 0, P("x"))
    route = Route(0, Move((8,), np.dtype(np.float32), source, target), None)
    for numbers_in_a_row in ((5, 0, 4, 1), (1, 4, 0, 5)):
        devices = {number: jax.devices()[number] for number in numbers_in_a_row}
        exchange = Exchange([Passage(route.plan, route.frames, route.words.dtype)], devices)
        assert [device.id for device in exchange.devices] == [0, 1, 4, 5]


def test_a_device_may_be_on_both_sides_and_keep_a_part():
    check_exchange([numbers((24, 2))], [sharding_on((4,), 0, P("x"))], [sharding_on((3,), 2, P("x"))])


@pytest.mark.parametrize("is_rare", [False, True])
def test_only_what_is_used_again_and_again_keeps_its_zeros(is_rare):
    """Of two alike arrays four devices receive a tile of 8 numbers each; they put in as many zeros, for both the same."""
    value, devices = numbers((32,)), jax.devices()
    source, target = sharding_on((4,), 0, P("x")), sharding_on((4,), 4, P("x"))
    array = jax.device_put(value, source)
    route = Route(0, Move.of(array, target), None)
    passages = [Passage(route.plan, route.frames, array.dtype)] * 2
    exchange = Exchange(passages, {d.id: d for d in devices}, is_rare=is_rare)
    held = [{shard.device.id: shard.data for shard in array.addressable_shards}] * 2
    gc.collect()
    before = len(jax.live_arrays())
    for tiles in [exchange(held) for _ in range(2)]:
        del tiles
    gc.collect()
    assert len(jax.live_arrays()) - before == (0 if is_rare else 4)
