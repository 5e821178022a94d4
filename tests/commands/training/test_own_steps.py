"""`train` of a step of the user's own, named as module:function: what the function may return, and what it is told otherwise."""

import json
import sys

import pytest

from tests.commands.command_line import run
from tests.commands.documents import document

OWN = """
import itertools

import jax
import jax.numpy as jnp
import numpy as np

W, X = np.full((8, 4), 0.5, np.float32), np.arange(128, dtype=np.float32).reshape(16, 8) / 128

def step(state, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, loss

def described(state, batch):
    state, loss = step(state, batch)
    return state, {"loss": loss, "norm": jnp.sum(state["w"] ** 2)}

def make():
    return {"w": jnp.asarray(W)}

def arrays():
    return step, {"w": jnp.asarray(W)}, X

def made():
    return described, make, lambda: (X * number for number in itertools.count(1))

def iterated():
    return described, make, (X * number for number in itertools.count(1))

def listed():
    return step, make, iter([X, X])

def talking():
    print("made of text")
    def aloud(state, batch):
        print("traced aloud")
        return step(state, batch)
    return aloud, {"w": jnp.asarray(W)}, X

def shapes():
    return step, {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}, X

def batch_shapes():
    return step, make, jax.ShapeDtypeStruct((16, 8), jnp.float32)

def nothing():
    return step, make, iter(())

def a_word():
    return step, make, object()

def without_loss():
    return lambda state, batch: (step(state, batch)[0], {"norm": batch}), make, X

def deep(state, batch):
    def loss_of(weights):
        return jnp.mean((jax.nn.relu(batch @ weights["a"]) @ weights["b"]) ** 2)
    loss, gradient = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradient), loss

def stages():
    return deep, {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}, X

def without_state():
    return lambda state, batch: step(state, batch)[1], make, X
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module, in the current folder."""
    (tmp_path / "own_training_of_a_user.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda name: f"own_training_of_a_user:{name}"
    sys.modules.pop("own_training_of_a_user", None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["arrays", "made", "iterated"])
def test_a_step_of_the_users_own_trains_as_under_jit(own, name, capsys):
    flags = ("--devices", "2", "--mesh", "2", "--steps", "3", "--compare-jit")
    found = document(capsys, "train", own(name), *flags)
    assert found["losses"] == pytest.approx(found["jit"]["losses"], rel=1e-6)
    assert len(set(found["losses"])) == 3
    if name == "arrays":
        assert found["losses"][2] < found["losses"][0]


def test_one_function_serves_plan_and_train(own, capsys):
    for name in ("arrays", "made", "iterated"):
        plan = document(capsys, "plan", own(name), "--mesh", "2")["plan"]
        assert {value["path"]: tuple(value["shape"]) for value in plan["inputs"]} == {
            "state/w": (8, 4),
            "batch": (16, 8),
        }


@pytest.mark.parametrize("command", ["plan", "train"])
def test_what_the_users_code_prints_is_no_part_of_the_document(own, command, capsys):
    capsys.readouterr()
    assert run(command, own("talking"), "--mesh", "2", *(["--steps", "1"] if command == "train" else []), "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out), "one document"
    assert "made of text" in printed.err
    assert "traced aloud" in printed.err
    assert run("plan", own("talking"), "--mesh", "2") == 0
    assert "traced aloud" in capsys.readouterr().out, "without --json it goes where print sends it"


def test_examples_are_counted(own, capsys):
    assert run("train", own("arrays"), "--mesh", "2", "--steps", "1") == 0
    assert "examples/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shapes", "returned shapes for its state, which can be planned and not trained: return arrays, or a function"),
        ("batch_shapes", "returned shapes for its batch, which can be planned and not trained: return arrays, which"),
        ("nothing", "returned batches of which there are none"),
        (
            "a_word",
            "returned object for its batches; it must be a tree of arrays or shapes, or something to iterate over",
        ),
        ("without_loss", "the step returns no scalar after the state, and no mapping with a scalar 'loss'"),
        ("listed", "the data ended after 2 batches, and 3 steps were asked for"),
        ("step", "must be a function without required arguments"),
    ],
)
def test_what_cannot_be_trained_is_said(own, name, words, capsys):
    assert run("train", own(name), "--mesh", "2", "--steps", "3") == 2
    assert words in capsys.readouterr().err


WITHOUT_STATE = (
    "does not return its state: no output has the structure, shapes and types of an argument, so there is no"
)


@pytest.mark.filterwarnings("default::autopar.AutoparWarning")
@pytest.mark.parametrize("command", ["plan", "explain", "verify", "rank"])
def test_a_step_that_returns_no_state_is_planned_with_a_warning_in_the_words_of_train(own, command, capsys):
    where = ("--clusters", "cpu") if command == "rank" else ()
    assert run(command, own("without_state"), "--devices", "2", *where) == 0
    assert capsys.readouterr().err.startswith(f"autopar: warning: <lambda> {WITHOUT_STATE}")


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_step_that_returns_no_state_is_not_trained(own, command, capsys):
    assert run(command, own("without_state"), "--devices", "2") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"autopar: <lambda> {WITHOUT_STATE}")
    assert printed.out == "", "the plan of a run that cannot begin"


def test_a_step_with_state_is_planned_without_a_warning(own, capsys):
    for name, flags in (("arrays", ("--mesh", "2")), ("stages", ("--mesh", "1/1", "--microbatches", "2"))):
        assert run("plan", own(name), *flags) == 0
    assert "mesh" in capsys.readouterr().out
