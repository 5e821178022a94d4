"""Batches of `autopar.data.sharded` are those of the source, where the step wants them, and go on exactly where they were."""

import functools
import json
import os
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.data import sharded
from autopar.data.feed import Feed
from autopar.errors import ArgumentError
from autopar.execution.batch_places import BatchLeaf
from tests.checkpoints.steps import ROWS, WAYS, WIDTH, bits, laid_out, make_batch, make_state, planned

step_of = functools.cache(planned)


def batches(count=6):
    return [make_batch(number) for number in range(count)]


def forever():
    number = 0
    while True:
        yield make_batch(number)
        number += 1


def losses(step, data, count=3):
    """The losses of so many steps, and the state."""
    state, found = laid_out(step, make_state()), []
    for _ in range(count):
        state, loss = step(state, next(data))
        found.append(np.float32(loss).tobytes())
    return found, bits(state)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in {"zero3", "2_stages"} else pytest.mark.slow) for way in WAYS]
)
def test_a_step_makes_the_same_of_batches_that_were_laid_out(way):
    step = step_of(way)
    expected = losses(step, iter(batches()))
    with_data = sharded(batches(), step)
    assert losses(step, with_data) == expected
    numbered = sharded(Examples(batches()), step, batch_size=ROWS)
    assert losses(step, numbered) == expected


class Examples:
    """The rows of batches, one by one; notes which are read."""

    def __init__(self, made):
        self.rows = [{name: one[name][i] for name in one} for one in made for i in range(ROWS)]
        self.read = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.read.append(number)
        return self.rows[number]


def test_microbatches_on_one_mesh_are_laid_out_as_the_step_takes_them():
    step = autopar.parallelize(
        lambda w, x: (w - (x @ w).sum() * w, (x @ w).mean()), mesh_shape=(2,), num_microbatches=4, donate_argnums=()
    )
    w, x = np.ones(4, np.float32), np.arange(64, dtype=np.float32).reshape(16, 4) / 64
    step.plan(w, x)
    assert step.last_plan().num_microbatches == 4
    (leaf,) = sharded([x], step)
    np.testing.assert_array_equal(np.asarray(leaf), x)
    np.testing.assert_array_equal(step(w, leaf)[0], step(w, x)[0])
    (place,) = step.places().batch.places
    assert leaf.find(place.rows, place.sharding).shape[0] == 4


def test_each_leaf_of_a_batch_lies_in_the_stages_that_read_it():
    places = step_of("2_stages").places().batch
    meshes = {
        name: {device.id for one in leaf.places for device in one.sharding.device_set} for name, leaf in places.items()
    }
    assert meshes == {"x": {0, 1}, "y": {2, 3}}
    assert [one.rows for one in places["x"].places] == [(0, 4), (4, 8)]
    np.testing.assert_array_equal(places["y"].rows_here(), np.arange(ROWS))
    leaf = next(sharded(batches(), step_of("2_stages")))["x"]
    assert isinstance(leaf, BatchLeaf)
    np.testing.assert_array_equal(leaf, make_batch(0)["x"])


def test_a_batch_that_was_laid_out_for_another_step_is_moved():
    batch = next(sharded(batches(), step_of("2_stages")))
    step = step_of("data_parallel")
    _, loss = step(laid_out(step, make_state()), batch)
    _, expected = step(laid_out(step, make_state()), make_batch(0))
    assert float(loss) == float(expected)


def test_a_buffer_that_is_filled_again_does_not_reach_batches_that_were_made():
    buffer = {"x": np.zeros((ROWS, WIDTH), np.float32), "y": np.zeros((ROWS, WIDTH), np.float32)}

    def refilled():
        for number in range(4):
            buffer["x"][...] = number
            yield buffer

    seen = [float(np.asarray(batch["x"]).max()) for batch in sharded(refilled, step_of("zero3"))]
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [batches, lambda: forever, forever, lambda: Examples(batches())])
def test_it_goes_on_behind_the_last_batch_that_was_handed_over(make):
    options = {"batch_size": ROWS, "shuffle_seed": 3, "epochs": 2} if isinstance(make(), Examples) else {}
    step = step_of("zero3")
    whole = [bits(b["x"]) for b, _ in zip(sharded(make(), step, **options), range(6), strict=False)]
    first = sharded(make(), step, **options)
    seen = [bits(next(first)["x"]) for _ in range(2)]
    position = json.loads(json.dumps(first.position()))
    time.sleep(0.05)  # while more is drawn ahead
    assert position["batches"] == 2
    assert position == dict(first.position())
    again = sharded(make(), step, **options)
    again.seek(position)
    seen += [bits(b["x"]) for b, _ in zip(again, range(4), strict=False)]
    assert seen == whole
    assert len(set(map(str, whole))) == 6


def bits_of_x(data):
    return [bits(batch["x"]) for batch in data]


def test_an_iterator_with_a_state_of_its_own_goes_on_from_it():
    class Counting:
        def __init__(self):
            self.number = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.number == 6:
                raise StopIteration
            self.number += 1
            return make_batch(self.number - 1)

        def get_state(self):
            return bytes([self.number])

        def set_state(self, state):
            self.number = state[0]

    data = sharded(Counting(), step_of("zero3"), prefetch=3)
    next(data)
    next(data)
    position = json.loads(json.dumps(data.position()))
    rest = bits_of_x(data)
    again, source = None, Counting()
    again = sharded(source, step_of("zero3"))
    again.seek(position)
    assert source.number == 2
    assert bits_of_x(again) == rest
    data.seek(position)  # backwards
    assert bits_of_x(data) == rest


def test_it_goes_on_after_close_and_ends_its_thread():
    before = {*threading.enumerate()}
    data = sharded(batches(), step_of("zero3"))
    seen = bits_of_x([next(data), next(data)])
    data.close()
    assert {*threading.enumerate()} <= before
    assert seen + bits_of_x(data) == bits_of_x(batches())
    assert next(data, None) is None
    gone = weakref.ref(data)
    del data
    assert gone() is None, "its thread keeps it"


def test_grain_goes_on_from_its_state():
    grain = pytest.importorskip("grain")
    order = grain.MapDataset.source(Examples(batches()).rows).shuffle(seed=1).batch(ROWS)
    data = sharded(order.to_iter_dataset(), step_of("zero3"))
    next(data)
    position = json.loads(json.dumps(data.position()))
    rest = bits_of_x(data)
    assert len(rest) == 5
    again = sharded(order.to_iter_dataset(), step_of("zero3"))
    again.seek(position)
    assert bits_of_x(again) == rest
    assert position["state"] is not None
    by_number = sharded(
        grain.MapDataset.source(Examples(batches()).rows).shuffle(seed=1), step_of("zero3"), batch_size=ROWS
    )
    assert len(bits_of_x(by_number)) == 6


def test_an_error_of_the_source_comes_behind_the_batches_before_it():
    def broken():
        yield make_batch(0)
        raise OSError("the disk is gone")

    data = sharded(broken, step_of("zero3"), prefetch=4)
    next(data)
    with pytest.raises(OSError, match="the disk is gone"):
        next(data)


def test_a_smaller_batch_is_handed_over_as_it_is():
    rest = {name: rows[:4] for name, rows in make_batch(9).items()}
    step = planned("data_parallel")
    state = laid_out(step, make_state())
    data = sharded([make_batch(0), rest], step)
    state, _ = step(state, next(data))
    batch = next(data)
    assert isinstance(batch["x"], np.ndarray)
    np.testing.assert_array_equal(batch["x"], rest["x"])


def summed(total, batch):
    return total + batch["y"].sum() + batch["x"].sum(), batch["y"]


@pytest.mark.parametrize("size", [8, 4], ids=["laid out", "on the host"])
@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (
            {"y": 5},
            {"y": 5.75},
            r"example 5 .* differs from example 0: example/y is float64\[\], in example 0 int64\[\]",
        ),
        ({"y": np.int8(5)}, {"y": 300}, r"example/y is int64\[\], in example 0 int8\[\]"),
        ({"y": np.uint8(5)}, {"y": -1}, r"example/y is int64\[\], in example 0 uint8\[\]"),
        ({"y": True}, {"y": 2}, r"example/y is int64\[\], in example 0 bool\[\]"),
        ({"y": np.float32(1)}, {"y": np.float64(0.1)}, r"example/y is float64\[\], in example 0 float32\[\]"),
        ({"y": 5}, {"z": 5}, r"example 5 .* structure .*'z': .*, and example 0 has .*'y': .*the same keys"),
        ({"y": 5}, {"x": np.ones(3, np.float32)}, r"example/x is float32\[3\], in example 0 float32\[2\].*padding"),
    ],
)
def test_an_example_that_differs_from_the_first_is_refused_by_its_number(first, other, words, size):
    examples = [{"x": np.ones(2, np.float32), **first} for _ in range(8)]
    examples[5] = {"x": examples[5]["x"], **({} if "z" in other else first), **other}
    step = autopar.parallelize(summed, mesh_shape=(4,), devices=4)
    step.plan(jnp.zeros(()), jax.tree.map(lambda x: np.stack([x] * 8), examples[0]))
    data = sharded(examples, step, batch_size=size)
    with pytest.raises(ArgumentError, match=words):
        list(data)


@pytest.mark.parametrize(
    ("first", "other"),
    [(3, np.int32(4)), (np.int32(3), 4), (np.uint8(3), 4), (0.5, np.float32(0.25)), (np.float32(0.5), 0.1), (0.5, 2)],
)
def test_numbers_of_other_types_are_taken_where_nothing_is_lost(first, other):
    examples = [{"x": np.ones(2, np.float32), "y": other if number % 2 else first} for number in range(8)]
    step = autopar.parallelize(summed, mesh_shape=(4,), devices=4)
    batch = {"x": np.ones((8, 2), np.float32), "y": np.array([one["y"] for one in examples], np.asarray(first).dtype)}
    step.plan(jnp.zeros(()), batch)
    (found,) = sharded(examples, step, batch_size=8)
    assert isinstance(found["y"], BatchLeaf)
    np.testing.assert_array_equal(np.asarray(found["y"]), batch["y"].astype(found["y"].dtype))


def test_arguments_that_cannot_be_used():
    step = step_of("zero3")
    with pytest.raises(ArgumentError, match="prefetch=0"):
        sharded(batches(), step, prefetch=0)
    with pytest.raises(ArgumentError, match="give batch_size"):
        sharded(batches(), step, shuffle_seed=1)
    with pytest.raises(ArgumentError, match="no len"):
        sharded(iter(batches()), step, batch_size=2)
    with pytest.raises(ArgumentError, match="too few"):
        sharded(batches(), step, batch_size=100)
    with pytest.raises(ArgumentError, match="planned"):
        sharded(batches(), autopar.parallelize(lambda w, x: w))
    used = sharded(forever(), step)
    next(used)
    with pytest.raises(ArgumentError, match="cannot go back"):
        used.seek({"batches": 0, "state": None})
    with pytest.raises(ArgumentError, match="ends after 6 batches"):
        sharded(batches(), step).seek({"batches": 9, "state": None})


def test_a_feed_makes_no_more_than_is_asked_for():
    made = []
    feed = Feed(lambda: made.append(1) or len(made), ahead=3)
    time.sleep(0.1)
    assert len(made) == 3
    assert feed.take() == 1
    time.sleep(0.1)
    assert len(made) == 4
    feed.stop()


ENDING = """
import jax
import jax.numpy as jnp
from autopar.data.feed import Feed

@jax.jit
def many(x):
    return jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), x)

started = []
def make():
    started.append(1)
    return many(jnp.eye(300)).block_until_ready()

make()
feed = Feed(make, ahead=2)
while len(started) < 2:
    pass
"""


def test_a_program_may_end_while_a_batch_is_made():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def odd_batches():
    """Batches whose leaves have examples, other numbers of rows, none at all, and a key."""
    made = np.random.default_rng(0).standard_normal((3, 8, WIDTH)).astype(np.float32)
    return [
        {
            "x": x,
            "scale": np.float32(number),
            "table": np.full((4, WIDTH), number, np.float32),
            "key": jax.random.key(number),
        }
        for number, x in enumerate(made)
    ]


def odd_step(weights, batch):
    def loss_of(weights):
        noise = jax.random.normal(batch["key"], (2,))
        return jnp.mean((batch["x"] @ weights + noise) ** 2) * batch["scale"] + (batch["table"] @ weights).sum()

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


@pytest.mark.parametrize("options", [{"mesh_shape": (4,)}, {"num_stages": 2}], ids=["one mesh", "stages"])
def test_leaves_of_a_batch_need_have_no_examples(options):
    step = autopar.parallelize(odd_step, devices=4, **options)
    step.plan(jnp.ones((WIDTH, 2)), odd_batches()[0])
    weights = expected = jnp.ones((WIDTH, 2))
    *whole, last = odd_batches()
    for batch in sharded([*whole, {**last, "x": last["x"][:4]}], step):
        weights, _ = step(weights, batch)
    for batch in [*whole, {**last, "x": last["x"][:4]}]:
        expected, _ = jax.jit(odd_step)(expected, batch)
    np.testing.assert_allclose(np.asarray(weights), expected, rtol=1e-5, atol=1e-5)


def test_a_buffer_that_is_filled_again_does_not_reach_smaller_batches_either():
    buffer = {name: rows[:4] for name, rows in make_batch(0).items()}

    def refilled():
        for number in range(3):
            for name, rows in make_batch(number).items():
                buffer[name][...] = rows[:4]
            yield buffer

    found = [batch["x"] for batch in sharded(refilled(), step_of("data_parallel"), prefetch=3)]
    for number, x in enumerate(found):
        np.testing.assert_array_equal(x, make_batch(number)["x"][:4])
