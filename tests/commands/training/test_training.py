"""`train` and `demo`: what they print, that they compute what `jax.jit` does, and how Ctrl-C ends them."""

import argparse
import csv
import dataclasses
import itertools
import json
import os
import re
import signal
import time

import jax.numpy as jnp
import pytest
from rich.console import Console

import autopar
from autopar.commands.arguments import devices
from autopar.commands.arguments.subject import find_trainee
from autopar.commands.parser import read
from autopar.commands.training import demo, train, training_run
from autopar.commands.training.training_run import Training, doubt_machine
from autopar.cost_model.json_files import schema_at, violations
from tests.commands.command_line import SMALL, run, start
from tests.commands.documents import document, schema_of


def test_train_reports_each_loss_and_agrees_with_jit(tmp_path, capsys):
    log = tmp_path / "loss.csv"
    flags = ("--mesh", "2,4", "--steps", "12", "--seed", "3", "--log", log, "--compare-jit", "--data-parallel")
    assert run("train", "mlp", *SMALL, "--learning-rate", "0.01", *flags) == 0
    printed = capsys.readouterr().out
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert all(float(row["seconds"]) > 0 for row in rows)
    first, last = float(rows[0]["loss"]), float(rows[-1]["loss"])
    assert "mesh x=2, y=4 (8 devices)" in printed
    assert f"first loss {first:.4f}, last loss {last:.4f}; " in printed
    assert re.search(r"examples/s; median step \S+ .?s measured, \S+ .?s predicted \(measured/predicted \S+\)", printed)
    difference = re.search(r"largest difference from jax.jit on one device over 12 steps: (\S+) in the loss", printed)
    assert difference
    assert float(difference[1]) < 1e-5
    assert last < first


@pytest.mark.parametrize(("ratio", "is_said"), [(2.0, True), (0.5, True), (1.2, False)])
def test_a_preset_is_doubted_where_steps_take_far_longer_or_less(ratio, is_said):
    step = autopar.parallelize(lambda state, batch: (state * jnp.mean(batch), jnp.sum(batch)), devices=2, cluster="cpu")
    plan = step.plan(jnp.ones(8), jnp.ones((4, 8)))
    said = list(doubt_machine(plan, ratio * plan.step_s))
    assert bool(said) == is_said
    words = " ".join(said)
    assert not said or re.search(
        r"multiplies matrices at \S+ GFLOP/s per device, \S+ of the \S+ that the preset cpu has", words
    )
    assert not said or ("autopar calibrate" in words and "--cluster machine.json" in words)
    assert not list(doubt_machine(dataclasses.replace(plan, cluster="measured"), ratio * plan.step_s))


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_run_says_that_the_preset_may_be_of_another_machine(command, capsys, monkeypatch):
    monkeypatch.setattr(training_run, "_FAR", 0.0)
    flags = ("--rounds", "1") if command == "bench" else ("--steps", "2")
    assert run(command, "mlp", *SMALL, "--devices", "2", *flags) == 0
    printed = capsys.readouterr().out
    assert "this machine multiplies matrices at" in printed
    assert "`autopar calibrate -o machine.json` measures all" in printed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["momentum", "adafactor", "lion"])
def test_an_optimizer_of_optax_trains_as_under_jit(optimizer, capsys):
    sizes = ("--layers", "1", "--hidden", "128", "--inputs", "128", "--batch", "16")  # adafactor factors from 128 on
    flags = ("--mesh", "2", "--zero", "3", "--steps", "3", "--compare-jit")
    found = document(capsys, "train", "mlp", *sizes, "--optimizer", optimizer, *flags)
    assert found["largest_difference"] < 1e-5
    assert len(set(found["losses"])) == 3


@pytest.mark.sweep
def test_the_same_seed_trains_the_same_way_and_another_one_does_not(tmp_path):
    losses = []
    for number, seed in enumerate("001"):
        log = tmp_path / f"{number}.csv"
        assert run("train", "mlp", *SMALL, "--devices", "2", "--steps", "3", "--seed", seed, "--log", log) == 0
        losses.append([row["loss"] for row in csv.DictReader(log.read_text().splitlines())])
    assert losses[0] == losses[1]
    assert not set(losses[0]) & set(losses[2])


def test_text_is_counted_in_tokens_and_other_data_in_examples():
    rates = {
        name: Training(trainee=find_trainee(name, {}, 0), steps=1, console=Console()).scale.rate(0.5)
        for name in ("gpt", "moe", "mlp", "wide_resnet", "t5")
    }
    assert rates == {
        "gpt": "2,048 tokens/s",
        "moe": "2,048 tokens/s",
        "mlp": "64 examples/s",
        "wide_resnet": "64 examples/s",
        "t5": "3,072 tokens/s",
    }


def test_ctrl_c_lets_the_running_step_finish_and_ends_with_a_summary():
    """In a process of its own, which also shows that the command makes its virtual devices itself."""
    flags = "--stages 2 --mesh 2 --microbatches 2 --steps 1000000"
    process = start("train", "mlp", *SMALL, *flags.split(), PYTHONUNBUFFERED="1")
    try:
        lines = list(itertools.takewhile(lambda line: "step 1/1000000" not in line, process.stdout))
        assert any("(4 devices)" in line for line in lines)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == ""
    assert re.search(r"stopped by Ctrl-C after \d+ of 1000000 steps: first loss \S+, last loss", output)


def stop_in(wanted, number=signal.SIGINT):
    """Ctrl-C, or another signal, comes in the first step of the run of this title."""

    def observe(title, step):
        if title == wanted and step.number == 1:
            signal.raise_signal(number)

    return {"observe": observe}


def test_sigterm_saves_and_ends_a_run_after_a_step(capsys, tmp_path):
    keeping = ("--checkpoints", tmp_path / "kept", "--save-every", "1000")
    options = read([*map(str, ("train", "mlp", *SMALL, "--devices", "2", "--steps", "1000", *keeping))])
    assert train.train(options, **stop_in("autopar", signal.SIGTERM)) == 130
    done = re.search(r"stopped by SIGTERM after (\d) of 1000 steps: first loss", capsys.readouterr().out)
    assert os.listdir(tmp_path / "kept") == [done[1]]


def test_ctrl_c_during_the_comparison_leaves_it_out_with_status_130(capsys):
    options = read(["train", "mlp", *SMALL, "--devices", "2", "--steps", "3", "--compare-jit"])
    assert train.train(options, **stop_in("jax.jit")) == 130
    printed = capsys.readouterr().out
    assert "first loss" in printed
    assert "comparison stopped by Ctrl-C after 1 of 3 steps" in printed
    assert "largest difference" not in printed


def test_ctrl_c_outside_of_a_run_ends_with_a_line_and_status_130(monkeypatch, capsys, tmp_path):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.commands.plans.plan.read_plan", interrupted)
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert run("show", str(plan)) == 130
    assert capsys.readouterr().err == "autopar: stopped by Ctrl-C\n"


def test_the_users_flags_for_xla_are_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    devices.ask_for_virtual_devices(4)
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag")
    devices.ask_for_virtual_devices(4)
    assert os.environ["XLA_FLAGS"] == "--xla_some_flag --xla_force_host_platform_device_count=4"


# --- demo -------------------------------------------------------------------------------------------------------------


def small_demo(**sizes: float) -> list[argparse.Namespace]:
    """The demo's options, for one mesh and for a pipeline, with a model that takes a second."""
    parts = demo.demo_options(argparse.Namespace(steps=6, seed=0, dtype="float32", json=False))
    sizes = {"layers": 1, "hidden": 16, "inputs": 16, "batch": 16, "learning_rate": 0.01, **sizes}
    return [argparse.Namespace(**(vars(options) | {"model": "mlp", "sizes": sizes})) for options in parts]


@pytest.mark.sweep
def test_the_demo_succeeds_if_the_loss_falls_as_it_does_with_jit(capsys):
    assert demo.demo(small_demo()) == 0
    printed = capsys.readouterr()
    one, two = printed.out.split("pipeline ───")
    assert "(8 devices) on cluster cpu\n" in one.splitlines(keepends=True)[1]
    assert "2 stages x 4 devices (8 devices) on cluster cpu\n4 microbatches, schedule 1f1b\n" in two
    for part in (one, two):
        assert "first loss" in part
        difference = re.search(r"largest difference from jax.jit on one device over 6 steps: (\S+) in the loss", part)
        assert float(difference[1]) < 1e-5
    assert ("jax.jit  step 6/6" in one, "jax.jit  step" in two) == (True, False)
    assert printed.err == ""


@pytest.mark.sweep
def test_the_demo_prints_one_document_of_both_parts(capsys):
    parts = small_demo()
    for options in parts:
        options.json = True
    assert demo.demo(parts, as_json=True, largest_difference=-1.0) == 1
    found = json.loads(capsys.readouterr().out)
    assert violations(found, schema_at(schema_of("demo"))) == []
    assert [part["title"] for part in found["parts"]] == ["one mesh", "pipeline"]
    assert all(part["largest_difference"] < 1e-5 for part in found["parts"])
    assert len(found["problems"]) == 2


@pytest.mark.sweep
def test_the_demo_fails_if_the_loss_does_not_fall_or_two_runs_differ(capsys):
    assert demo.demo(small_demo(learning_rate=1e4)[1:], largest_difference=-1.0) == 1
    told = capsys.readouterr().err
    assert "autopar demo: pipeline: the loss did not fall" in told
    assert "autopar demo: pipeline: the losses differ by" in told


def test_ctrl_c_in_the_first_part_of_the_demo_ends_it_with_status_130(capsys):
    assert demo.demo(small_demo(), **stop_in("autopar")) == 130
    assert "pipeline ───" not in capsys.readouterr().out


def test_ctrl_c_in_the_demo_prints_the_document_of_what_was_done(capsys):
    parts = small_demo()
    for options in parts:
        options.json = True
    assert demo.demo(parts, as_json=True, **stop_in("autopar")) == 130
    found = json.loads(capsys.readouterr().out)
    assert violations(found, schema_at(schema_of("demo"))) == []
    assert [part["stopped_by"] for part in found["parts"]] == ["Ctrl-C"]


@pytest.mark.slow
def test_the_demo_as_make_demo_runs_it():
    process = start("demo", "--steps", "10")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "2 stages x 4 devices (8 devices) on cluster cpu" in output
    assert output.count("largest difference from jax.jit on one device over 10 steps") == 2


@pytest.mark.sweep
def test_a_run_that_goes_on_has_the_losses_of_one_that_was_not_interrupted(tmp_path, capsys):
    def losses(*flags):
        log = tmp_path / "losses.csv"
        assert run("train", "mlp", *SMALL, "--devices", "2", *flags, "--log", log) == 0
        return [row["loss"] for row in csv.DictReader(log.read_text().splitlines())]

    keeping = ("--checkpoints", tmp_path / "kept", "--save-every", "2")
    whole = losses("--steps", "5")
    assert losses("--steps", "3", *keeping) == whole[:3]
    assert sorted(os.listdir(tmp_path / "kept")) == ["2", "3"]
    assert run("train", "mlp", *SMALL, "--devices", "2", "--steps", "5", *keeping) == 2
    assert "go on from it with --resume" in capsys.readouterr().err
    assert losses("--steps", "5", "--resume", *keeping) == whole[3:]
    assert "goes on from the checkpoint of step 3" in capsys.readouterr().out


def test_no_step_is_made_during_a_save_if_that_is_asked_for(tmp_path, capsys):
    kept = tmp_path / "kept"
    found = {}

    def observe(title, step):
        found[step.number] = {int(name) for name in os.listdir(kept) if name.isdecimal()}

    flags = ("--devices", "2", "--steps", "6", "--checkpoints", kept, "--save-every", "2", "--wait-for-saves")
    assert train.train(read([*map(str, ("train", "mlp", *SMALL, *flags))]), observe=observe) == 0
    assert found == {1: set(), 2: set(), 3: {2}, 4: {2}, 5: {2, 4}, 6: {2, 4}}
    assert run("train", "mlp", *SMALL, "--devices", "2", "--wait-for-saves") == 2
    assert "say with --save-every N how often it saves" in capsys.readouterr().err
