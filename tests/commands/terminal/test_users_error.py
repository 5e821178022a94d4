"""Errors of the user's own code are told by the user's lines; those of autopar keep their traceback."""

import textwrap

import pytest

from autopar.__main__ import main
from autopar.commands.terminal import users_error

PROGRAM = """
    import jax, jax.numpy as jnp

    shapes = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")

    def raises():
        raise ValueError("my own mistake")

    def product():
        def step(state, batch):
            return state @ batch, 1.0
        return step, *shapes

    def branch():
        def step(state, batch):
            if batch.sum() > 0:
                state = state + 1
            return state, batch.sum()
        return step, *shapes
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "users_program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    (tmp_path / "users_typo.py").write_text("def step(:\n", encoding="utf-8")
    (tmp_path / "users_import.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("users_program:raises", ["ValueError: my own mistake", "users_program.py:7, in raises: raise ValueError"]),
        ("users_program:product", ["TypeError: dot_general", "users_program.py:11, in step: return state @ batch"]),
        ("users_program:branch", ["TracerBoolConversionError", "users_program.py:16, in step: if batch.sum() > 0:"]),
        ("users_typo:f", ["your code cannot be read: invalid syntax (users_typo.py, line 1)"]),
        ("users_import:f", ["ZeroDivisionError: division by zero", "users_import.py:1, in <module>: 1 / 0"]),
    ],
)
def test_an_error_of_the_users_code_is_told_by_its_lines_alone(folder, capsys, target, said):
    assert main(["plan", target, "--devices", "2", "--mesh", "2"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("autopar: your code ")
    for words in said:
        assert words in text
    assert "Traceback" not in text
    assert "commands" not in text, "no frame of autopar"


def test_with_v_the_whole_traceback_is_kept(folder):
    with pytest.raises(ValueError, match="my own mistake"):
        main(["plan", "users_program:raises", "-v"])


def test_an_error_of_autopar_keeps_its_traceback(folder, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("autopar.commands.plans.plan.find_subject", broken)
    monkeypatch.setattr(users_error, "_is_users", lambda filename: False)  # this file stands for autopar's
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(["plan", "users_program:raises"])


def test_a_cluster_with_fewer_devices_is_one_line_or_one_row(capsys):
    for more in ([], ["--stages", "2"]):
        assert main(["plan", "mlp", "--cluster", "h200", "--devices", "16", *more]) == 2
        assert "cluster 'h200' has at most 8 devices, not 16" in capsys.readouterr().err
    assert main(["rank", "mlp", "--clusters", "h200", "--devices", "2,16", "--stages", "1"]) == 0
    assert "no plan: cluster 'h200' has at most 8 devices, not 16" in " ".join(capsys.readouterr().out.split())


def test_a_conflict_does_not_offer_more_devices_than_the_cluster_joins(capsys):
    asked = ["plan", "mlp", "--cluster", "h200", "--devices", "8", "--memory-limit", "37KB", "--conflict"]
    assert main([*asked, "--planning-seconds", "20"]) == 1
    assert "--devices 16" not in capsys.readouterr().out
