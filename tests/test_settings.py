"""The memory limit of a plan: what the user says, or what the devices have and JAX may take of it."""

import types

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import settings
from autopar.cost_model.hardware import preset

SHAPE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
CLUSTER = "dgx-h100"


def limit_of(monkeypatch, stats, **wishes):
    """The limit of a plan on two devices that say of their memory what `stats` says."""

    def memory_stats():
        if isinstance(stats, Exception):
            raise stats
        return stats

    looked_at = types.SimpleNamespace(memory_stats=memory_stats)
    step = autopar.parallelize(lambda w, x: (w, x @ w), cluster=CLUSTER, **wishes)
    monkeypatch.setattr(settings, "list_devices", lambda _: [looked_at, looked_at])
    return step.plan(SHAPE, SHAPE).memory_limit_bytes


USABLE = int(preset(CLUSTER).usable_memory_bytes)


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"bytes_limit": 60 * 2**30}, 60 * 2**30),
        ({"bytes_limit": 90 * 2**30}, USABLE),
        ({"bytes_in_use": 5}, USABLE),
        (None, USABLE),
        (jax.errors.JaxRuntimeError("only supported for addressable devices"), USABLE),
    ],
)
def test_a_plan_keeps_to_what_jax_may_take_of_devices_at_hand(monkeypatch, stats, expected):
    assert limit_of(monkeypatch, stats) == expected


def test_a_limit_that_is_given_counts_and_a_number_of_devices_looks_at_none(monkeypatch):
    few = {"bytes_limit": 2**30}
    assert limit_of(monkeypatch, few, memory_limit_bytes=2**31) == 2**31
    assert limit_of(monkeypatch, few, devices=2) == USABLE
