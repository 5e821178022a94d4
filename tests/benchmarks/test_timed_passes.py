"""The benchmarks that time passes of the planner find them: a pass that is renamed breaks them here, not next year."""

import os
from types import ModuleType

import jax.numpy as jnp
import pytest

import autopar
from autopar import api
from autopar.inter_op import search_pipeline
from tests.benchmarks.scripts import load_script


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module; it does not hold this process to one core, and is gone after the test."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    return load_script(name, monkeypatch)


def test_the_passes_of_one_mesh_are_timed_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    script, original = load("planner_time", monkeypatch), api.trace
    with script.watched() as watch:
        autopar.parallelize(lambda w, x: w - (x @ w).sum(), devices=4, cluster="cpu").plan(
            jnp.ones((8, 8)), jnp.ones((4, 8))
        )
    assert all(watch.seconds[phase] > 0 for phase in script.PHASES), watch.seconds
    assert api.trace is original


def test_the_phases_of_a_search_for_stages_are_timed_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("stage_search_time", monkeypatch)
    originals = [getattr(search_pipeline, name) for name in script.Laps.NAMES]
    with script.Laps() as laps:
        timed = [getattr(search_pipeline, name) for name in laps.NAMES]
        assert not set(timed) & set(originals)
    assert [getattr(search_pipeline, name) for name in script.Laps.NAMES] == originals
