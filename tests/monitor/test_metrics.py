"""Each step has its metrics: through a callback, as lines of JSON, for TensorBoard."""

import gc
import json
import logging
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.monitor import Monitor, StepMetrics

METRICS = StepMetrics(
    name="train",
    call=3,
    step_s=0.5,
    call_s=0.25,
    predicted_s=0.4,
    exposed_comm_s=None,
    device_bytes=None,
    device_peak_bytes=None,
    host_bytes=1 << 20,
)


def train_step(state, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
    return state - 0.1 * gradient, loss


def test_steps_have_metrics_and_the_same_results(tmp_path):
    file, seen = tmp_path / "metrics.jsonl", []
    state, batch = jnp.ones((8, 8)), np.ones((8, 8), np.float32)
    step = autopar.parallelize(train_step, mesh_shape=(2,), plan_cache=False)
    plan = step.plan(state, batch)
    with Monitor(metrics=file, on_step=seen.append):
        for _ in range(3):
            state, loss = step(state, batch)
    expected = jnp.ones((8, 8))
    for _ in range(3):
        expected, reference = jax.jit(train_step)(expected, batch)
    np.testing.assert_allclose(loss, reference, rtol=1e-5)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["call"] for row in rows] == [one.call for one in seen] == [1, 2, 3]
    for row in rows:
        assert row["name"] == "train_step"
        assert row["predicted_s"] == plan.step_s
        assert row["exposed_comm_s"] == plan.comm_s - plan.hidden_s
        assert 0 < row["step_s"] < 60
        assert row["host_bytes"] > 1 << 20
        assert "device_bytes" not in row


def test_a_monitor_that_is_used_again_measures_again_and_keeps_no_result(tmp_path, caplog):
    file, seen = tmp_path / "metrics.jsonl", []
    step = autopar.parallelize(train_step, mesh_shape=(2,), plan_cache=False)
    state, batch = jnp.ones((8, 8)), np.ones((8, 8), np.float32)
    monitor = Monitor(metrics=file, on_step=seen.append)
    for _ in range(2):
        with monitor, caplog.at_level(logging.ERROR, "autopar"):
            for _ in range(2):
                state, loss = step(state, batch)
    loss.block_until_ready()
    assert [one.call for one in seen] == [1, 2, 1, 2]
    assert [json.loads(line)["call"] for line in file.read_text().splitlines()] == [1, 2, 1, 2]
    assert caplog.text == ""
    kept = weakref.ref(loss)
    del loss
    gc.collect()
    assert kept() is None


def test_a_callback_that_raises_ends_no_training(caplog):
    def broken(metrics):
        raise ValueError("broken on purpose")

    step = jax.jit(train_step)
    with Monitor(on_step=broken) as monitor, caplog.at_level(logging.ERROR, "autopar"):
        from autopar.events import StepRun, reach, running

        run = StepRun(name="train", plan=None, standing=list)
        with running(run, []):
            _, loss = step(jnp.ones((2, 2)), jnp.ones((2, 2)))
        reach("launched", run, [loss])
        assert monitor is not None
    assert "the metrics of a step could not be passed on" in caplog.text
    assert "broken on purpose" in caplog.text


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"cannot write .*nowhere"), Monitor(metrics=tmp_path / "nowhere" / "m"):
        pass


def test_tensorboard_gets_numbers_if_a_package_writes_for_it(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, tag, value, step):
            written.append((tag, value, step))

        def close(self):
            written.append("closed")

    for name in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ArgumentError, match="pip install tensorboardX"), Monitor(tensorboard=tmp_path):
        pass
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    with Monitor(tensorboard=tmp_path) as monitor:
        monitor._sinks[0](METRICS)
    assert written == [
        str(tmp_path),
        ("train/step_s", 0.5, 3),
        ("train/call_s", 0.25, 3),
        ("train/predicted_s", 0.4, 3),
        ("train/host_bytes", 1 << 20, 3),
        "closed",
    ]
