"""Digests are equal for equal content, and tell apart what differs in value, type or place."""

import dataclasses
import enum
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autopar.content import Identity, digest_of
from autopar.cost_model.hardware import PRESETS, preset
from autopar.layouts.constraints import data_parallel, zero2


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: object
    y: object = 0
    note: object = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass
class Pixel:
    x: object
    y: object = 0


class Opaque:
    """Its text holds its address."""


def double(x):
    return 2 * x


DIFFERENT = [
    *(None, True, 1, 1.0, "1", b"1", float("nan"), float("inf"), "", (), (1, (2,)), ((1, 2),), (1, 2)),
    *({"a": 1}, {"a": 2}, {"b": 1}, {1}, {2}, {1, 2}),
    *(Colour.RED, Colour.BLUE, Point(1), Point((1,)), Pixel(1), double, max, min, float, int),
    *(functools.partial(double, 1), functools.partial(double, 2), functools.partial(double, x=1)),
    *(np.arange(3), np.arange(3.0), np.arange(4), np.zeros((2, 3)), np.zeros((3, 2)), np.float32(1)),
    *(np.dtype("float32"), np.dtype("float16"), jnp.bfloat16, jnp.zeros(2, jnp.bfloat16)),
    *(jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)),
    *(PartitionSpec("x"), PartitionSpec(None, "x"), jax.lax.Precision.HIGHEST, data_parallel(), zero2(), Opaque()),
]


def test_what_differs_has_another_digest():
    found = [digest_of(value) for value in DIFFERENT]
    assert [
        (DIFFERENT[i], DIFFERENT[j]) for i, j in itertools.combinations(range(len(found)), 2) if found[i] == found[j]
    ] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (np.arange(3, dtype=np.int32), jnp.arange(3)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x", "y", "z"}, frozenset(["z", "y", "x"])),
        (Point(1, note="one"), Point(1, note="other")),
        (Opaque(), Opaque()),
        (Identity(1), Identity(2)),
        ([1, 2], (1, 2)),
    ],
)
def test_what_is_the_same_has_the_same_digest(one, other):
    assert digest_of(one) == digest_of(other)


def test_every_preset_has_a_digest_of_its_own():
    by_name = {preset(name).name: digest_of(preset(name)) for name in PRESETS}
    assert len(set(by_name.values())) == len(by_name) > 10
    cluster = preset("cpu")
    assert digest_of(cluster) == digest_of(preset("cpu"))
    slower = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, launch_s=1.0))
    assert digest_of(slower) != digest_of(cluster)
