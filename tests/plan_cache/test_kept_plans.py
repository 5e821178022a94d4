"""A plan that the cache has kept is restored without a graph and without checks: it is what the checked way restores."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import decide
from autopar.commands.arguments.subject import find_subject
from autopar.errors import PlanError
from autopar.microbatches.named_phases import NamedPhases
from autopar.plan_cache.folder import CacheFolder
from autopar.plan_cache.key import digest_of_wishes
from autopar.plan_cache.offered import Offer, offering
from autopar.plan_cache.recall import Recalled
from autopar.program.call import CallSignature, bind_arguments
from autopar.program.trace import trace
from tests.inter_op.test_search import two_nodes
from tests.libraries.modes import MODES
from tests.oracles import assert_same_as_jit
from tests.plan_cache.restored_twice import assert_restored_alike
from tests.random_programs.programs import random_step
from tests.zoo import ZOO

GPT = {"layers": 4, "hidden": 32, "heads": 2, "seq": 8, "batch": 32}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(ZOO))
@pytest.mark.filterwarnings("ignore::autopar.errors.AutoparWarning")
def test_models_in_every_mode(name, mode):
    try:
        assert_restored_alike(*ZOO[name](), **MODES[mode])
    except autopar.UnsupportedProgramError:
        assert (name, mode) in {("resnet_block", "microbatches"), ("resnet_block", "stages")}, "it has batch statistics"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("number", range(40))
@pytest.mark.filterwarnings("ignore::autopar.errors.AutoparWarning")
def test_random_steps(number):
    program = random_step(number)
    try:
        assert_restored_alike(program.fun, *program.arguments, **program.options)
    except autopar.UnsupportedProgramError:
        assert number % 4 == 3, "it sees the whole batch"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "wishes",
    [
        {"num_stages": 2, "num_microbatches": 8, "schedule": "interleaved", "virtual_stages": 2},
        {"num_stages": 2, "num_microbatches": 4, "schedule": "zb-h1", "recompute": "layer"},
        {"num_stages": 2, "num_microbatches": 1, "schedule": "gpipe"},
        {"devices": 4, "cluster": two_nodes()},
        {"mesh_shape": (4,), "num_microbatches": 4, "recompute": "layer"},
    ],
    ids=["interleaved", "zb-h1 and recomputation", "one microbatch", "open on two nodes", "recomputation"],
)
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.filterwarnings("ignore::autopar.errors.AutoparWarning")
def test_wishes(scan, wishes):
    subject = find_subject("gpt", GPT | {"scan_layers": scan})
    assert_restored_alike(subject.step, subject.state, subject.batch, **({"devices": 4} | wishes))


# --- when the rest is restored ----------------------------------------------------------------------------------------


def train_step(state, batch):
    def loss_of(w):
        return jnp.mean((jnp.tanh(batch["x"] @ w["up"]) @ w["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss


def arguments():
    key = jax.random.key(0)
    state = {"up": jax.random.normal(key, (16, 32)), "down": jax.random.normal(key, (32, 16))}
    return state, {"x": jax.random.normal(key, (16, 16))}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> CacheFolder:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "plans"))
    return CacheFolder(tmp_path / "plans")


def parallel(**wishes):
    return autopar.parallelize(train_step, devices=4, **wishes)


@pytest.fixture
def restored(monkeypatch) -> list[object]:
    """The plans that were restored from the cache."""
    asked: list[object] = []
    real = decide._restore_kept

    def restore(settings, traced, plan, phases):
        asked.append(plan)
        return real(settings, traced, plan, phases)

    monkeypatch.setattr(decide, "_restore_kept", restore)
    return asked


@pytest.mark.parametrize("wishes", [{}, {"num_microbatches": 4}, {"num_stages": 2, "num_microbatches": 4}])
def test_a_plan_is_looked_at_without_restoring_what_runs(folder, restored, wishes):
    first = parallel(**wishes).plan(*arguments())
    again = parallel(**wishes)
    assert again.plan(*arguments()) == first
    assert str(again.last_plan()) == str(first)
    assert restored == []
    assert_same_as_jit(train_step, again, *arguments())
    assert restored == [first]


def test_state_is_created_by_a_recalled_plan(folder, restored):
    first = parallel(mesh_shape=(4,)).plan(*arguments())
    again = parallel(mesh_shape=(4,))
    again.plan(*arguments())
    state = again.init_state(lambda: arguments()[0])
    assert restored == [first]
    assert {path: leaf.sharding.spec for path, leaf in state.items()} == {
        path: first.input(f"state/{path}").partition_spec for path in state
    }


def test_what_runs_is_restored_under_the_settings_of_jax_under_which_it_was_traced(folder):
    with jax.enable_x64(True):
        given = jax.tree.map(lambda x: x.astype(jnp.float64), arguments())
        first = parallel(num_microbatches=2).plan(*given)
        again, other = parallel(num_microbatches=2), parallel(num_microbatches=2)
        again.plan(*given)
        other.plan(*given)
    assert other._memory.last.planned.traced.fingerprint.digest == first.fingerprint
    assert {leaf.dtype for leaf in again.compile().traced.outputs} == {jnp.dtype("float64")}


def test_the_clock_of_a_search_after_damage_begins_then(folder, restored, monkeypatch):
    """A plan may be looked at long before the step is compiled: the search in its place has all of its seconds."""
    parallel().plan(*arguments())
    again = parallel(planning_seconds=30.0)
    again.plan(*arguments())
    kept = again._memory.last.planned
    assert isinstance(kept, Recalled)
    over: list[bool] = []
    real = decide._search_timed

    def search(settings, traced):
        over.append(settings.budget.is_over)
        return real(settings, traced)

    def refuse(*_):
        raise PlanError("damaged")

    monkeypatch.setattr(decide, "_search_timed", search)
    object.__setattr__(kept._restore.func.__self__.ways, "restore_kept", refuse)
    kept._restore.func.__self__.settings.budget.stop()
    assert_same_as_jit(train_step, again, *arguments())
    assert over == [False]
    assert again.last_plan()._asked[1] is again._memory.last.planned.traced, "`why` knows what was asked"


def test_a_plan_that_a_checkpoint_offers_is_recalled_if_the_cache_has_kept_it(folder, restored):
    """A restart from a checkpoint asks for the plan of the checkpoint, which the same machine has kept."""
    first = parallel(mesh_shape=(2, 2))
    plan = first.plan(*arguments())
    offer = Offer(plan.to_json(), digest_of_wishes(first._settings), "a checkpoint")
    again, elsewhere = parallel(mesh_shape=(2, 2)), parallel(mesh_shape=(2, 2))
    with offering(offer):
        assert again.plan(*arguments()) == plan
    assert isinstance(again._memory.last.planned, Recalled)
    assert_same_as_jit(train_step, again, *arguments())
    assert restored == [plan]
    folder.clear()
    with offering(offer):
        assert elsewhere.plan(*arguments()) == plan
    assert not isinstance(elsewhere._memory.last.planned, Recalled)
    assert folder.files() == []


def test_the_plan_of_a_checkpoint_comes_before_another_one_that_the_cache_has_kept(folder, restored):
    """Its arrays lie as that plan says."""
    first = parallel(mesh_shape=(2, 2))
    plan = first.plan(*arguments())
    other = dataclasses.replace(plan, planning_s=plan.planning_s + 1)
    offer = Offer(other.to_json(), digest_of_wishes(first._settings), "a checkpoint")
    again = parallel(mesh_shape=(2, 2))
    with offering(offer):
        assert again.plan(*arguments()) == other
    assert restored == []


# --- what was kept of another step ------------------------------------------------------------------------------------


def phases_of(count):
    signature = CallSignature(train_step, (1,), (), "auto")
    traced = trace(signature, bind_arguments(signature, arguments(), {}))
    step = autopar.parallelize(train_step, devices=4, mesh_shape=(2, 2), num_microbatches=count, plan_cache=False)
    step.plan(*arguments())
    return traced, NamedPhases.from_json(decide._name_phases(step._memory.last.planned))


def test_phases_are_the_same_after_writing_and_reading():
    traced, phases = phases_of(4)
    assert NamedPhases.from_json(phases.to_json()) == phases
    assert NamedPhases.of(phases.find(traced)) == phases
    assert set(phases.phases) == {"p", "b", "e"}
    assert json.loads(phases.to_json())["microbatches"] == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phases": "b"}, "the phases are those of 1 equations, not of"),
        ({"equations": ()}, "names no strategy of its own for each of the"),
        ({"strategies": ()}, "names no strategy of its own for each of the"),
    ],
)
def test_phases_of_another_step_are_refused(changes, words):
    traced, phases = phases_of(4)
    with pytest.raises(PlanError, match=words):
        dataclasses.replace(phases, **changes).find(traced)


def test_a_layout_that_an_operation_does_not_offer_is_refused_with_its_line():
    traced, phases = phases_of(4)
    names = [eqn.primitive.name for eqn in traced.program.walk()]
    at = names.index("tanh")
    other = next(one for one in phases.equations if one.startswith("dot_general"))
    equations = (*phases.equations[:at], other, *phases.equations[at + 1 :])
    with pytest.raises(PlanError, match=r"`tanh` at .*test_kept_plans.py.* cannot be done as"):
        dataclasses.replace(phases, equations=equations).find(traced)
