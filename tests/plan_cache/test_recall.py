"""A later run recalls the plan of an earlier one: when it does, when it must not, and that it is the same plan."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import autopar
from autopar import decide
from autopar.cost_model.hardware import preset
from autopar.errors import AutoparWarning, OutOfMemoryError
from autopar.plan import Plan
from autopar.plan_cache.folder import CacheFolder
from autopar.plan_cache.key import key_of
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from tests.oracles import assert_same_as_jit

TABLE = np.arange(16.0, dtype=np.float32)


def train_step(state, batch, scale=1.0, table=TABLE, axis=0):
    def loss_of(w):
        return jnp.mean((jnp.tanh(batch["x"] @ w["up"]) @ w["down"] + table) ** 2) * scale

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss + jnp.sum(gradients["up"].sum(axis))


def arguments(batch=16, hidden=32, names=("up", "down")):
    up, down = names
    key = jax.random.key(0)
    state = {up: jax.random.normal(key, (16, hidden)), down: jax.random.normal(key, (hidden, 16))}
    return state, {"x": jax.random.normal(key, (batch, 16))}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> CacheFolder:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "plans"))
    return CacheFolder(tmp_path / "plans")


@pytest.fixture
def searches(monkeypatch) -> list[object]:
    """What was searched for."""
    asked: list[object] = []
    real = decide._search

    def search(settings, traced):
        asked.append(traced)
        return real(settings, traced)

    monkeypatch.setattr(decide, "_search", search)
    return asked


def parallel(step=train_step, **options):
    return autopar.parallelize(step, **({"devices": 4} | options))


def key(step=train_step, given=None, **options) -> str | None:
    signature = CallSignature(step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, given or arguments(), {}))
    return key_of(parallel(step, **options)._settings, traced)


# --- the same question ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mesh_shape": {"data": 2, "model": 2}, "constraints": autopar.zero3(params="state/*", optimizer="state/*")},
        {"num_microbatches": 4, "recompute": "layer", "mesh_shape": (4,)},
        {"num_stages": 2, "num_microbatches": 4},
    ],
    ids=["open", "constrained", "microbatches", "stages"],
)
@pytest.mark.filterwarnings("ignore:recompute='layer' finds no layers")
def test_a_later_run_takes_over_the_plan_without_a_search_and_computes_the_same(options, folder, searches):
    first = parallel(**options).plan(*arguments())
    again = parallel(**options)
    assert again.plan(*arguments()) == first
    assert len(searches) == 1
    assert_same_as_jit(train_step, again, *arguments())


def test_a_cache_that_is_off_is_neither_read_nor_written(folder, searches, monkeypatch):
    parallel(plan_cache=False).plan(*arguments())
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    parallel().plan(*arguments())
    assert not folder.path.exists()
    monkeypatch.setenv("AUTOPAR_CACHE", str(folder.path))
    parallel().plan(*arguments())
    assert [file.path.parent for file in folder.files()] == [folder.path]
    parallel(plan_cache=False).plan(*arguments())
    assert len(searches) == 4


def test_a_given_plan_is_neither_looked_up_nor_kept(folder, searches):
    plan = parallel(plan_cache=False).plan(*arguments())
    parallel(plan=plan).plan(*arguments())
    assert folder.files() == []


def test_a_search_that_fails_keeps_nothing(folder):
    with pytest.raises(OutOfMemoryError):
        parallel(memory_limit_bytes=100).plan(*arguments())
    assert folder.files() == []


# --- what makes another question --------------------------------------------------------------------------------------

SLOW = preset("cpu")
SLOW = dataclasses.replace(SLOW, device=dataclasses.replace(SLOW.device, launch_s=1.0))
OTHER_QUESTIONS = {
    "a literal": {"step": functools.partial(train_step, scale=2.0)},
    "an equation's parameter": {"step": functools.partial(train_step, axis=1)},
    "a constant": {"step": functools.partial(train_step, table=TABLE + 1)},
    "a shape": {"given": arguments(batch=32)},
    "the number of devices": {"devices": 2},
    "the figures of the cluster": {"cluster": SLOW},
    "another cluster": {"cluster": "dgx-h100"},
    "the mesh": {"mesh_shape": (4,)},
    "names of its axes": {"mesh_shape": {"data": 4}},
    "several meshes": {"mesh_shape": [(2,), (2,)]},
    "the memory limit": {"memory_limit_bytes": 10**6},
    "constraints": {"constraints": autopar.data_parallel()},
    "other constraints": {"constraints": {"state/up": autopar.Replicated()}},
    "redundant compute": {"allow_redundant_compute": True},
    "kinds of collectives": {"collectives": ["all-reduce", "all-gather"]},
    "microbatches": {"num_microbatches": 2},
    "stages": {"num_stages": 2},
    "the schedule": {"schedule": "gpipe"},
    "virtual stages": {"virtual_stages": 2},
    "recomputation": {"recompute": "layer"},
}


def test_whatever_decides_what_a_search_finds_is_in_the_key():
    keys = {"nothing": key(), **{name: key(**changes) for name, changes in OTHER_QUESTIONS.items()}}
    with jax.default_matmul_precision("highest"):
        keys["settings of JAX"] = key()
    with jax.threefry_partitionable(False):
        keys["random numbers of JAX"] = key()
    assert len(set(keys.values())) == len(keys), keys


def test_large_constants_count_by_shape_and_type_and_random_keys_by_value(monkeypatch):
    monkeypatch.setattr("autopar.plan_cache.key.LARGE_BYTES", TABLE.nbytes - 1)
    tables = (TABLE, TABLE + 1, jnp.asarray(TABLE), TABLE.astype(np.float16), TABLE[:1])
    keys = [key(functools.partial(train_step, table=table)) for table in tables]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 3

    def with_noise(seed):
        random = jax.random.key(seed)
        return lambda state, batch: (state, jax.random.normal(random, (4,)).sum() + batch["x"].sum())

    assert key(with_noise(0)) == key(with_noise(0)) != key(with_noise(1))


def test_names_of_leaves_are_in_the_key_as_constraints_and_plans_speak_of_them():
    def step(state, batch):
        return jax.tree.map(lambda w: w - batch["x"].mean(), state), batch["x"].sum()

    assert key(step, arguments()) != key(step, arguments(names=("other", "names")))


def test_a_step_that_follows_another_depends_on_that_ones_plan_but_not_on_how_long_it_took():
    leader = parallel(mesh_shape=(2, 2))
    leader.plan(*arguments())
    first = key(follow=leader)
    (program,) = leader._memory.programs.values()
    plan = dataclasses.replace(program.planned.plan, planning_s=99.0)
    program.planned = dataclasses.replace(program.planned, plan=plan)
    assert key(follow=leader) == first
    other = parallel(mesh_shape=(4,))
    other.plan(*arguments())
    assert key(follow=other) != first


@pytest.mark.parametrize("same", [{"planning_processes": 2}, {"planning_seconds": 1}, {"planning_seconds": None}])
def test_how_a_plan_is_sought_is_not_in_the_key(same):
    assert key(**same) == key()


def test_a_step_with_a_rule_of_the_users_own_has_no_key(folder, monkeypatch):
    monkeypatch.setattr("autopar.rules.table.USER_RULES", {})
    monkeypatch.setattr("autopar.rules.unlisted.register.USER_RULES", autopar.rules.table.USER_RULES)
    twice = Primitive("twice_for_the_cache")
    twice.def_abstract_eval(lambda x: x)

    def step(state, batch):
        return jax.tree.map(lambda w: twice.bind(w) - batch["x"].mean(), state), batch["x"].sum()

    with pytest.warns(AutoparWarning, match="twice_for_the_cache"):
        parallel(step).plan(*arguments())
    assert len(folder.files()) == 1
    autopar.register_rule("twice_for_the_cache", "a b -> a b")
    parallel(step).plan(*arguments())
    assert len(folder.files()) == 1
    assert key(step) is None


# --- a plan that ended early ------------------------------------------------------------------------------------------


def test_a_plan_that_ended_early_serves_searches_with_no_more_seconds(folder, monkeypatch):
    asked, real = [], decide._search

    def search(settings, traced):
        asked.append(settings.planning_seconds)
        planned = real(settings, traced)
        if settings.planning_seconds == 5.0:
            settings.budget._started -= 5.0  # as if the seconds were over
            return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, ended_early=True))
        return planned

    monkeypatch.setattr(decide, "_search", search)
    found = [parallel(planning_seconds=limit).plan(*arguments()) for limit in (5, 3, 5, 60, 5, 1, None)]
    assert asked == [5.0, 60.0]
    assert [plan.ended_early for plan in found] == [True] * 3 + [False] * 4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("early_is_faster", [False, True])
def test_after_a_longer_search_the_faster_plan_is_used_and_kept(early_is_faster, folder, monkeypatch):
    asked, real = [], decide._search

    def search(settings, traced):
        asked.append(settings.planning_seconds)
        planned = real(settings, traced)
        settings.budget._started -= settings.planning_seconds
        slower = (settings.planning_seconds == 9.0) == early_is_faster
        compute_s = planned.plan.compute_s * (2 if slower else 1)
        return dataclasses.replace(
            planned, plan=dataclasses.replace(planned.plan, ended_early=True, compute_s=compute_s)
        )

    monkeypatch.setattr(decide, "_search", search)
    early, longer, again = (parallel(planning_seconds=limit).plan(*arguments()) for limit in (5, 9, 9))
    assert asked == [5.0, 9.0]
    assert longer.step_s <= early.step_s
    assert again == longer
    assert (longer == early) is early_is_faster


def test_a_search_that_is_interrupted_does_not_undo_a_longer_one(folder, monkeypatch):
    asked, real = [], decide._search

    def search(settings, traced):
        asked.append(settings.planning_seconds)
        planned = real(settings, traced)
        settings.budget._started -= 5.0 if settings.planning_seconds == 5.0 else 1.0  # as if Ctrl-C came then
        return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, ended_early=True))

    monkeypatch.setattr(decide, "_search", search)
    for limit in (5, 60, 5):
        parallel(planning_seconds=limit).plan(*arguments())
    assert asked == [5.0, 60.0]


# --- what is brought up to date ---------------------------------------------------------------------------------------

TEXT = """
import jax.numpy as jnp
from jax import lax


def step(state, batch):
    hidden = jnp.tanh(batch["x"] @ state["up"])
    return state, (hidden @ state["down"]).sum()
"""


def step_of(text: str, path) -> object:
    path.write_text(text)
    names: dict[str, object] = {}
    exec(compile(text, str(path), "exec"), names)
    return names["step"]


def test_lines_of_source_are_those_of_today(folder, searches, tmp_path):
    options = {"constraints": {"state/up": jax.P("x"), "batch/x": jax.P(None, "x")}, "mesh_shape": (4,)}
    before = parallel(step_of(TEXT, tmp_path / "m.py"), **options).plan(*arguments())
    moved = step_of(TEXT.replace("def step", "# a comment\n\n\ndef step"), tmp_path / "m.py")
    after = parallel(moved, **options).plan(*arguments())
    assert len(searches) == 1
    lines = [[re.findall(r"m.py:(\d+)", one.source) for one in plan.collectives] for plan in (before, after)]
    assert lines == [[["7"], []], [["10"], []]]
    searched = parallel(moved, plan_cache=False, **options).plan(*arguments())
    assert dataclasses.replace(searched, planning_s=after.planning_s) == after


def test_operations_that_no_longer_come_from_one_line_are_another_question(tmp_path):
    def written(second: str) -> object:
        body = "    return state, first(batch['x']).sum() + SECOND(batch['x']).sum()"
        helpers = "def first(x):\n    return x * 2.0\n\ndef second(x):\n    return x * 2.0\n"
        return step_of(f"{helpers}\ndef step(state, batch):\n{body.replace('SECOND', second)}\n", tmp_path / "m.py")

    assert key(written("first")) != key(written("second"))


def test_what_a_search_warned_of_is_said_again(folder, searches):
    given = arguments(batch=7)
    for _ in range(2):
        with pytest.warns(AutoparWarning, match="which no mesh axis of size"):
            parallel().plan(*given)
    assert len(searches) == 1


# --- what cannot be used ----------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: dataclasses.replace(entry, plan="{}"),
        lambda entry: dataclasses.replace(entry, plan=entry.plan.replace(entry.plan[20:40], "")),
        lambda entry: dataclasses.replace(entry, sources=(*entry.sources, "m.py:1")),
        lambda entry: dataclasses.replace(
            entry,
            plan=dataclasses.replace(
                Plan.from_json(entry.plan), cluster_figures="", equations=Plan.from_json(entry.plan).equations[::-1]
            ).to_json(),
        ),
    ],
    ids=["no plan", "no JSON", "more lines", "other decisions"],
)
def test_an_entry_that_cannot_be_restored_is_a_line_in_the_log_and_a_search(damage, folder, searches, caplog):
    first = parallel().plan(*arguments())
    (file,) = folder.files()
    folder.keep(damage(folder.find(file.key)))
    step = parallel()
    with caplog.at_level("INFO", logger="autopar"):
        step.plan(*arguments())
        step.compile(*arguments())  # some damage is only seen when the step is to run
    again = step.last_plan()
    assert "cannot be restored" in caplog.text
    assert len(searches) == 2
    assert dataclasses.replace(again, planning_s=first.planning_s) == first
    assert_same_as_jit(train_step, step, *arguments())
    assert parallel().plan(*arguments()) == again, "the search's plan has taken its place"
    assert len(searches) == 2
