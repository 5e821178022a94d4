"""Errors that speak of arguments of Python speak of flags on the command line, and of nothing that it cannot do."""

import sys

import pytest

from autopar.commands.arguments.in_flags import in_flags
from tests.commands.command_line import run

STEPS = """
import jax
import jax.numpy as jnp

X = jnp.ones((16, 8))

def step(state, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(state)
    return state - 0.1 * gradient, loss

def no_loss():
    return lambda state, batch: (step(state, batch)[0], {"norm": batch}), jnp.ones((8, 4)), X

def no_number():
    return lambda state, batch: (step(state, batch)[0], step(state, batch)[1] * jnp.nan), jnp.ones((8, 4)), X
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("give mesh_shape=[(1,), (2,), ...]", "give --mesh 1/2/..."),
        ("mesh_shape=[(2, 4)]", "--mesh 2,4"),
        ("mesh_shape=(2, 4): a mesh", "--mesh 2,4: a mesh"),
        ("with mesh_shape={'data': 2, 'model': 4}", "with --mesh data=2,model=4"),
        ("use a smaller mesh_shape, or", "use a smaller --mesh, or"),
        ("num_microbatches, recompute and layouts left open", "--microbatches, --recompute and layouts left open"),
        ("batch_statistics='microbatch'", "--batch-statistics microbatch"),
        ("schedule='zb-h1' is for stages: give num_stages=2", "--schedule zb-h1 is for stages: give --stages 2"),
        ("memory_limit_bytes=2_000, or a higher memory_limit_bytes", "--memory-limit 2KiB, or a higher --memory-limit"),
        ("memory_limit_bytes=372_358_966", "--memory-limit 356MiB"),
        ("memory_limit_bytes=373_293_056", "--memory-limit 356MiB"),
        ("planning_seconds are over: allow more", "--planning-seconds are over: allow more"),
        ("num_microbatches=1, or on one mesh 'auto'; or", "--microbatches 1, or on one mesh leave that open; or"),
        ("state/num_stages is 'num_stages' in a/mesh_shape.py", "state/num_stages is 'num_stages' in a/mesh_shape.py"),
    ],
)  # fmt: skip
def test_arguments_become_flags_and_names_of_the_user_stay(words, said):
    assert in_flags(words) == said
    assert in_flags(said) == said


@pytest.mark.filterwarnings("default::autopar.AutoparWarning")
@pytest.mark.parametrize(
    ("command", "ends"),
    [
        ("train of_python:no_loss --steps 1", "no mapping with a scalar 'loss': return one of them\n"),
        ("train of_python:no_number --steps 1", "Lower the learning rate or look at this batch.\n"),
        ("plan of_python:no_loss --num-stages 2", "did you mean --stages?\n"),
        ("plan mlp --mesh 2,2,2,2,2,2,2", "autopar: --mesh 2,2,2,2,2,2,2: a mesh has 1 to 6 axes, this has 7\n"),
        ("plan mlp --stages 3", "or give each a mesh of its own: --mesh 1/2/...\n"),
        ("plan mlp --leaf nope", "; `autopar explain ... --full` lists all\n"),
        (
            "plan wide_resnet --mesh 1 --stages 2 --microbatches 2",
            "have the statistics of a microbatch: --batch-statistics microbatch.\n",
        ),
    ],
)
def test_an_error_on_the_command_line_advises_what_it_can_do(command, ends, tmp_path, monkeypatch, capsys):
    (tmp_path / "of_python.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run(*command.split(), *(() if "--mesh" in command or "--stages" in command else ("--devices", "2"))) == 2
    sys.modules.pop("of_python", None)
    printed = capsys.readouterr().err
    assert printed.endswith(ends)
    assert not any(name in printed for name in ("num_", "_shape", "find_loss", "Guard(", "plan.show"))
