"""The command line as a user meets it: what it prints, where it writes, how it fails, how Ctrl-C ends it.

Commands run in this process through `main`, unless the environment matters: then in one of their own, without the
devices that tests/conftest.py asks for.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import autopar
from autopar.__main__ import main
from autopar.commands import devices, planning, recording, training, values
from autopar.errors import ArgumentError
from autopar.explain import explain
from autopar.models import build
from autopar.options import Replicated, Split
from autopar.pipeline_plan import PipelinePlan, plan_from_json
from autopar.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--layers", "1", "--hidden", "16", "--inputs", "16", "--batch", "16")
STAGES = ("--stages", "2", "--mesh", "1", "--microbatches", "4")
CLEAN_ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def run(*argv: str) -> int:
    return main([str(word) for word in argv])


def planned(tmp_path: Path, *argv: str) -> Plan:
    """The plan that `plan mlp ARGV -o` writes."""
    file = tmp_path / "plan.json"
    assert run("plan", "mlp", *SMALL, *argv, "-o", file) == 0
    return Plan.from_json(file.read_text())


def start(*argv: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "autopar", *argv]
    pipe, env = subprocess.PIPE, CLEAN_ENVIRONMENT | environment
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


# --- plan and show ----------------------------------------------------------------------------------------------------


def test_plan_prints_the_plan_that_it_writes_and_show_prints_it_again(tmp_path, capsys):
    plan = planned(tmp_path)
    printed = capsys.readouterr().out
    assert plan.mesh_shape in {(8,), (2, 4), (4, 2)}
    assert [line.rstrip() for line in printed.splitlines()][:-2] == explain(plan).splitlines()
    assert printed.endswith(f"plan written to {tmp_path / 'plan.json'}\n")
    assert run("show", tmp_path / "plan.json", "--full") == 0
    shown = capsys.readouterr().out
    assert [line.rstrip() for line in shown.splitlines()] == explain(plan, full=True).splitlines()


def test_plan_needs_no_devices(tmp_path):
    file = str(tmp_path / "plan.json")
    process = start("plan", "mlp", *SMALL, "--devices", "1024", "-o", file, JAX_PLATFORMS="no_such_platform")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "(1024 devices)" in output
    assert Plan.from_json(Path(file).read_text()).is_optimal


def test_plan_takes_sizes_mesh_and_limits_from_its_flags(tmp_path):
    plan = planned(
        tmp_path, "--mesh", "data=2,model=2", "--memory-limit", "1MiB", "--outputs", "24", "--cluster", "h200"
    )
    assert (plan.mesh_shape, plan.axis_names) == ((2, 2), ("data", "model"))
    assert (plan.memory_limit_bytes, plan.cluster) == (2**20, "h200")
    assert plan.input("state/params/Dense_1/kernel").shape == (16, 24)
    assert plan.input("batch/inputs").shape == (16, 16)


def planned_pipeline(tmp_path: Path, *argv: str) -> PipelinePlan:
    """The plan that `plan mlp --layers 3 ARGV -o` writes."""
    file = tmp_path / "plan.json"
    assert run("plan", "mlp", *SMALL, "--layers", "3", *argv, "-o", file) == 0
    plan = plan_from_json(file.read_text())
    assert isinstance(plan, PipelinePlan)
    return plan


def test_a_pipeline_is_planned_printed_with_its_schedule_written_and_shown_again(tmp_path, capsys):
    plan = planned_pipeline(tmp_path, *STAGES, "--schedule", "gpipe")
    assert (plan.num_stages, plan.num_microbatches, plan.schedule, plan.virtual_stages) == (2, 4, "gpipe", 1)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[0] == "2 stages x 1 device (2 devices) on cluster cpu"
    assert printed[1] == "4 microbatches, schedule gpipe"
    picture = planning.schedule_grid(plan)
    assert picture.startswith("mesh 0 | F0 F1 F2 F3 ")
    assert printed[:-2] == explain(plan, schedule_grid=picture).splitlines()
    assert run("show", tmp_path / "plan.json", "--full") == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == explain(plan, full=True, schedule_grid=picture).splitlines()


@pytest.mark.parametrize("flags", ["--mesh 1,2/2,1", "--mesh 1,2 --mesh 2,1", "--mesh 1,2/2,1 --stages 2 --devices 4"])
def test_each_stage_may_have_a_mesh_of_its_own(flags, tmp_path):
    plan = planned_pipeline(tmp_path, *flags.split(), "--microbatches", "2")
    assert [stage.plan.mesh_shape for stage in plan.stages] == [(1, 2), (2, 1)]
    assert [stage.first_device for stage in plan.stages] == [0, 2]


def test_virtual_stages_share_meshes_and_the_picture_names_them(tmp_path):
    plan = planned_pipeline(tmp_path, "--layers", "6", "--virtual-stages", "2", *STAGES)
    assert (plan.schedule, plan.num_stages, [stage.mesh for stage in plan.stages]) == ("interleaved", 4, [0, 1, 0, 1])
    assert "F0b" in planning.schedule_grid(plan)


def test_a_schedule_that_is_too_long_for_a_line_is_not_drawn(tmp_path):
    plan = planned_pipeline(tmp_path, *STAGES)
    assert planning.schedule_grid(plan)
    assert planning.schedule_grid(dataclasses.replace(plan, num_microbatches=64)) == ""


def test_a_backward_is_drawn_as_long_as_it_takes(tmp_path):
    plan = planned_pipeline(tmp_path, *STAGES)
    for seconds, cell in ((1e-3, "B0"), (2e-3, "B0 -"), (9e-3, "B0 -  -")):
        stages = tuple(dataclasses.replace(s, forward_s=1e-3, backward_s=seconds) for s in plan.stages)
        line = planning.schedule_grid(dataclasses.replace(plan, stages=stages)).splitlines()[1]
        assert line.startswith(f"mesh 1 | .  F0 {cell}  F1" if cell.endswith("-") else f"mesh 1 | .  F0 {cell} F1")


def test_microbatches_without_stages_are_one_mesh(tmp_path, capsys):
    assert planned(tmp_path, "--mesh", "2", "--microbatches", "4").num_microbatches == 4
    assert "mesh x=2 (2 devices) on cluster cpu, in 4 microbatches\n" in capsys.readouterr().out


def test_plan_obeys_constraints_of_which_the_last_that_matches_holds(tmp_path):
    rules = ("--constraint", "state/params/*/kernel=-,x", "--constraint", "state/params/Dense_1/*=replicated")
    plan = planned(tmp_path, "--devices", "4", "--mesh", "4", *rules)
    assert plan.input("state/params/Dense_0/kernel").spec == ((), ("x",))
    assert plan.input("state/params/Dense_1/kernel").spec == ((), ())


def test_plan_data_parallel_and_zero_are_constraints(tmp_path):
    replicated = planned(tmp_path, "--mesh", "4", "--data-parallel")
    assert replicated.input("batch/inputs").spec == (("x",), ())
    assert not any(any(value.spec) for value in replicated.inputs if value.role == "state")
    moments = "state/opt_state/1/0/mu/Dense_0/kernel"
    second, third = (planned(tmp_path, "--mesh", "4", "--zero", stage) for stage in ("2", "3"))
    assert any(second.input(moments).spec)
    assert not any(second.input("state/params/Dense_0/kernel").spec)
    assert any(third.input("state/params/Dense_0/kernel").spec)


OWN_STEP = """
import jax
import jax.numpy as jnp

def train_step(state, batch):
    gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, jnp.sum(gradient)

def my_step():
    return train_step, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, jax.ShapeDtypeStruct((16, 8), jnp.float32)

def half():
    return train_step
"""


def test_plan_takes_a_step_of_the_users_own_from_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_step_of_a_user.py").write_text(OWN_STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run("plan", "own_step_of_a_user:my_step", "--mesh", "2,2") == 0
    assert "state/w" in capsys.readouterr().out
    assert run("plan", "own_step_of_a_user:half") == 2
    assert (
        "half() returned function; it must return (train_step, state_shapes, batch_shapes)" in capsys.readouterr().err
    )


def test_a_pipe_that_is_closed_early_gives_no_traceback(tmp_path):
    file = tmp_path / "plan.json"
    planned(tmp_path)
    process = start("show", "--full", str(file))
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == ""
    assert process.wait(60) == 1


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "the following arguments are required: COMMAND (see autopar --help)"),
        ("plam gpt", "invalid choice: 'plam'"),
        ("plan", "the following arguments are required: MODEL"),
        (
            "plan gtp",
            "no model 'gtp': the models are mlp, gpt, gpt_scan, moe, wide_resnet, bert, t5, llama, unet; for a step",
        ),
        ("plan gpt --layer 2", "plan gpt has no argument '--layer'; did you mean --layers?"),
        ("plan gpt --ffn_factor 2", "plan gpt has no argument '--ffn_factor'; did you mean --ffn-factor?"),
        (
            "plan gpt --zzz",
            "plan gpt has no argument '--zzz'; it takes --allow-redundant-compute, --aux-metrics, --batch,",
        ),
        ("plan --hidden 2 gpt", "plan, without MODEL right after plan, has no argument '--hidden'"),
        ("plan gpt extra", "plan gpt has no argument 'extra'"),
        ("plan gpt --layers two", "argument --layers: 'two' is not a whole number"),
        ("plan gpt --dropout x", "argument --dropout: 'x' is not a number"),
        ("plan gpt --heads 3", "hidden is 128 and heads is 3, but heads must divide hidden"),
        ("plan gpt --mesh 3,x", "argument --mesh: '3,x' is not a mesh; write the sizes of its axes, such as 2,4, or"),
        ("plan gpt --devices 0", "argument --devices: '0' is not a whole number of at least 1"),
        (
            "plan gpt --memory-limit 16XB",
            "argument --memory-limit: '16XB' is not a size; write a number and one of B, KB",
        ),
        (
            "plan gpt --mesh 2,4 --devices 4",
            "--mesh has 8 devices and --devices is 4: make them agree, or give only one",
        ),
        ("plan gpt --cluster dgx", "argument --cluster: no cluster preset 'dgx'; there are: cpu, "),
        ("plan gpt --mesh 2/x", "argument --mesh: 'x' is not a mesh; write the sizes of its axes, such as 2,4, or"),
        ("plan gpt --mesh 2/4 --stages 3", "--mesh gives 2 shapes and --stages is 3: give one shape per stage, or one"),
        ("plan gpt --mesh 2/4 --devices 8", "the meshes of all stages have 6 devices and --devices is 8: make them"),
        ("plan gpt --mesh 2 --stages 2 --devices 2", "the meshes of all stages have 4 devices and --devices is 2"),
        ("plan gpt --stages 0", "argument --stages: '0' is not a whole number of at least 1"),
        ("plan gpt --stages two", "argument --stages: 'two' is not a whole number of at least 1"),
        ("plan gpt --microbatches 0", "argument --microbatches: '0' is not a whole number of at least 1"),
        ("plan gpt --schedule 2f2b", "argument --schedule: invalid choice: '2f2b' (choose from "),
        ("plan mlp --mesh 2 --schedule gpipe", "and this plan has one mesh: ask for two or more --stages"),
        (
            "plan mlp --mesh 2 --virtual-stages 2",
            "--schedule and --virtual-stages are for pipelines, and this plan has",
        ),
        ("plan mlp --stages 2 --microbatches 3", "num_microbatches=3 does not divide the examples of the batch"),
        ("plan mlp --stages 3", "8 devices cannot be shared equally by 3 stages"),
        ("plan gpt --zero 1", "argument --zero: invalid choice: 1"),
        ("plan gpt --constraint state/w", "'state/w' is not GLOB=SPEC; SPEC is, for each dimension, an axis"),
        ("plan mlp --constraint nosuch/*=x", "constraint 'nosuch/*' matches no leaf of the step's arguments"),
        ("plan mlp --constraint batch/inputs=model,-", "names mesh axis 'model'; the mesh has x"),
        ("plan mlp --mesh 2 --memory-limit 1KB", "no plan fits"),
        ("plan mlp -o nosuch/plan.json", "cannot write nosuch/plan.json: there is no folder nosuch"),
        ("plan nosuch.module:step", "cannot find 'nosuch.module:step': No module named 'nosuch'"),
        ("plan json:nosuch", "has no attribute 'nosuch'; give an importable module:function"),
        ("plan json:__name__", "'json:__name__' must be a function without required arguments"),
        ("plan json:dumps", "'json:dumps' must be a function without required arguments"),
        ("show nosuch.json", "cannot read nosuch.json: No such file or directory"),
        ("show .", "cannot read .: Is a directory"),
        ("train gtp", "no model 'gtp'"),
        ("train my.module:step", "'my.module:step' is a step without data: train takes mlp, gpt"),
        ("train mlp --steps 0", "argument --steps: '0' is not a whole number of at least 1"),
        ("train mlp --seed x", "argument --seed: invalid int value: 'x'"),
        ("train mlp --mesh 2 --devices 4", "--mesh has 2 devices and --devices is 4"),
        ("train mlp --devices 512 --steps 1", "512 devices are asked for, JAX has 8 of platform cpu; XLA_FLAGS is"),
        ("train mlp --steps 1 --log nosuch/log.csv", "cannot write nosuch/log.csv: No such file or directory"),
        ("train gpt --seq 99999999 --steps 1", "use a shorter sequence"),
        ("train mlp --stages 2 --mesh 8 --steps 1", "16 devices are asked for, JAX has 8 of platform cpu"),
        ("demo --steps 1 --layers 2", "demo has no argument '--layers'"),
    ],
)
def test_bad_input_is_told_on_standard_error_with_status_2(command, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(*command.split()) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.startswith("autopar: ")
    assert printed.out == ""
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"not json", "not a plan: Expecting value"),
        (b"[]", "a JSON object with a 'version' is expected"),
        (b'{"version": 99}', "plan of version 99"),
        (b'{"version": 1}', "not a plan of version 1: missing fields"),
        (b'{"kind": "pipeline"}', "plan of version None, this autopar reads version 1: plan again"),
        (
            b'{"kind": "pipeline", "version": 1}',
            "not a pipeline plan of version 1: missing fields ['bubble', 'cluster',",
        ),
        (b"\xff\xfe\xff", "is not a plan that `autopar plan -o` wrote"),
    ],
)
def test_a_file_that_is_no_plan_is_told(text, words, tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_bytes(text)
    assert run("show", file) == 2
    assert words in capsys.readouterr().err


def test_a_plan_with_a_damaged_part_is_told(tmp_path, capsys):
    fields = json.loads(planned(tmp_path).to_json())
    del fields["inputs"][0]["shape"]
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    capsys.readouterr()
    assert run("show", tmp_path / "plan.json") == 2
    assert "shape" in capsys.readouterr().err


def test_what_is_found_out_before_planning_is_one_line(capsys):
    for command in ("plan gtp", "plan gpt --mesh 3,x", "plan gpt --devices 0", "show nosuch.json"):
        assert run(*command.split()) == 2
        assert capsys.readouterr().err.count("\n") == 1


# --- help and version -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--version", "autopar "),
        ("--help", "train a model on real data under a plan"),
        ("plan --help", "module:function"),
        ("plan moe --help", "--capacity-factor FLOAT"),
        ("plan gpt --help", "--schedule {auto,1f1b,gpipe,inference,interleaved,zb-h1}"),
        ("train gpt --help", "--timeline FILE"),
        ("train wide_resnet --help", "--imagenet-stem, --no-imagenet-stem"),
    ],
)
def test_help_and_version_go_to_standard_output_with_status_0(command, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*command.split())
    assert stopped.value.code == 0
    assert words in capsys.readouterr().out


WITHOUT_JAX = """
import sys
from autopar.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as stopped:
    status = stopped.code
assert not {"jax", "flax", "optax", "pulp", "networkx"} & set(sys.modules)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("--help", 0),
        ("--version", 0),
        *((f"{name} --help", 0) for name in ("plan", "train", "show", "demo", "simulate", "calibrate")),
        ("train t5 --help", 0),
        ("plan gpt --layrs 3", 2),
        ("plan gtp", 2),
        ("plan gpt --mesh 2x", 2),
        ("plan gpt --cluster nosuch", 2),
    ],
)
def test_help_and_arguments_that_cannot_be_read_are_answered_without_importing_jax(command, status):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert done.stdout if status == 0 else done.stderr.startswith("autopar: ")


def test_every_public_name_is_there_when_it_is_used_and_others_are_told():
    assert {name for name in autopar.__all__ if getattr(autopar, name).__module__.startswith("autopar.")} == {
        *autopar.__all__
    }
    assert {*autopar.__all__} <= {*dir(autopar)}
    with pytest.raises(AttributeError, match=r"module 'autopar' has no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018


# --- train ------------------------------------------------------------------------------------------------------------


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


def test_train_runs_a_pipeline_as_jit_does_and_records_a_step(tmp_path, capsys):
    log, trace = tmp_path / "loss.csv", tmp_path / "trace.json"
    flags = (*STAGES, "--steps", "12", "--seed", "3", "--log", log, "--compare-jit", "--timeline", trace)
    assert run("train", "mlp", *SMALL, "--learning-rate", "0.01", *flags) == 0
    printed = capsys.readouterr().out
    losses = [float(row["loss"]) for row in csv.DictReader(log.read_text().splitlines())]
    assert printed.startswith("2 stages x 1 device (2 devices) on cluster cpu\n4 microbatches, schedule 1f1b\n")
    assert f"first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}; " in printed
    assert re.search(r"median step \S+ .?s measured, \S+ .?s predicted \(measured/predicted \S+\)", printed)
    difference = re.search(r"largest difference from jax.jit on one device over 12 steps: (\S+) in the loss", printed)
    assert float(difference[1]) < 1e-5
    assert losses[-1] < losses[0]
    assert f"timeline of step 2 written to {trace}, for https://ui.perfetto.dev" in printed.replace("\n", " ")
    assert re.search(r"busy: mesh 0 \d+%, mesh 1 \d+%", printed.replace("\n", " "))
    tasks = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["cat"] == "forward"]
    assert sorted((e["tid"], e["name"]) for e in tasks) == [(t, f"forward {k}") for t in (0, 1) for k in range(4)]


def test_a_timeline_needs_a_pipeline_and_a_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run("train", "mlp", *SMALL, "--mesh", "2", "--steps", "1", "--timeline", "trace.json") == 2
    assert "--timeline shows the instructions of a pipeline, and this plan has one mesh" in capsys.readouterr().err
    assert run("train", "mlp", *SMALL, *STAGES, "--steps", "1", "--timeline", "nosuch/trace.json") == 2
    assert "cannot write nosuch/trace.json: there is no folder nosuch" in capsys.readouterr().err


def test_a_run_that_was_stopped_before_the_recorded_step_has_no_timeline(tmp_path):
    console = Console(record=True)
    recorder = recording.Recorder(pipeline=None, recorded=2, calls=1)
    recorder.write(tmp_path / "trace.json", console)
    assert console.export_text() == "no timeline: the run was stopped before step 2\n"
    assert not (tmp_path / "trace.json").exists()


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
        name: training.Run(build(name), 1, 0, Console()).rate(0.5)
        for name in ("gpt", "moe", "mlp", "wide_resnet", "t5")
    }
    assert rates == {
        "gpt": "2,048 tokens/s",
        "moe": "2,048 tokens/s",
        "mlp": "64 examples/s",
        "wide_resnet": "64 examples/s",
        "t5": "3,072 tokens/s",
    }


@pytest.mark.parametrize("flags", ["--devices 4", "--stages 2 --mesh 2 --microbatches 2"])
def test_ctrl_c_lets_the_running_step_finish_and_ends_with_a_summary(flags):
    """In a process of its own, which also shows that the command makes its virtual devices itself."""
    process = start("train", "mlp", *SMALL, *flags.split(), "--steps", "1000000", PYTHONUNBUFFERED="1")
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


def test_ctrl_c_during_the_comparison_leaves_it_out_with_status_130(monkeypatch, capsys):
    steps = training._steps

    def stopped_in_jit(run, *arguments, title, **more):
        run.stop.made = title == "jax.jit"
        return steps(run, *arguments, title=title, **more)

    monkeypatch.setattr(training, "_steps", stopped_in_jit)
    assert run("train", "mlp", *SMALL, "--devices", "2", "--steps", "3", "--compare-jit") == 130
    printed = capsys.readouterr().out
    assert "first loss" in printed
    assert "comparison stopped by Ctrl-C after 1 of 3 steps" in printed
    assert "largest difference" not in printed


def test_ctrl_c_outside_of_a_run_ends_with_a_line_and_status_130(monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.commands.planning.read_plan", interrupted)
    assert run("show", "plan.json") == 130
    assert capsys.readouterr().err == "autopar: stopped by Ctrl-C\n"


def test_a_second_ctrl_c_interrupts_at_once_and_the_usual_handler_comes_back():
    usual = signal.getsignal(signal.SIGINT)
    stop = training.StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        assert stop.made
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is usual


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
    parts = training.demo_options(argparse.Namespace(steps=6, seed=0))
    sizes = {"layers": 1, "hidden": 16, "inputs": 16, "batch": 16, "learning_rate": 0.01, **sizes}
    return [argparse.Namespace(**(vars(options) | {"model": "mlp", "sizes": sizes})) for options in parts]


def test_the_demo_succeeds_if_the_loss_falls_as_it_does_with_jit(capsys):
    assert training.demo(small_demo()) == 0
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


def test_the_demo_fails_if_the_loss_does_not_fall(capsys):
    assert training.demo(small_demo(learning_rate=1e4)[:1]) == 1
    assert "autopar demo: one mesh: the loss did not fall" in capsys.readouterr().err


def test_the_demo_fails_if_the_two_runs_differ(capsys, monkeypatch):
    monkeypatch.setattr(training, "LARGEST_DIFFERENCE", -1.0)
    assert training.demo(small_demo()[1:]) == 1
    assert "autopar demo: pipeline: the losses differ by" in capsys.readouterr().err


def test_ctrl_c_in_the_first_part_of_the_demo_ends_it_with_status_130(monkeypatch, capsys):
    steps = training._steps

    def stopped(run, *arguments, **more):
        run.stop.made = True
        return steps(run, *arguments, **more)

    monkeypatch.setattr(training, "_steps", stopped)
    assert training.demo(small_demo()) == 130
    assert "pipeline ───" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_as_make_demo_runs_it():
    process = start("demo", "--steps", "10")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "2 stages x 4 devices (8 devices) on cluster cpu" in output
    assert output.count("largest difference from jax.jit on one device over 10 steps") == 2


# --- values of flags --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("16GB", 16 * 10**9), ("16GiB", 16 * 2**30), ("1.5 kib", 1536), (".5MB", 500_000), ("2TB", 2 * 10**12)],
)
def test_sizes_are_read_with_decimal_and_binary_units(text, size):
    assert values.byte_count(text) == size


@pytest.mark.parametrize("text", ["", "GB", "16G", "-1GB", "0", "1e9", "0.1B", "16 XB"])
def test_a_size_that_is_ambiguous_or_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; write a number and one of B, KB, MB"):
        values.byte_count(text)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("8", (8,)), ("2,4", (2, 4)), ("2, 2,2", (2, 2, 2)), ("data=2,model=4", {"data": 2, "model": 4})],
)
def test_meshes_are_read_with_and_without_names(text, shape):
    assert values.mesh_shape(text) == shape
    assert values.mesh_size(values.mesh_shape(text)) in (4, 8)


def test_a_mesh_for_each_stage_is_read():
    assert values.mesh_shapes("2,4") == ((2, 4),)
    assert values.mesh_shapes("1,2/1,2/1,4") == ((1, 2), (1, 2), (1, 4))
    assert values.mesh_shapes("data=2/4") == ({"data": 2}, (4,))


@pytest.mark.parametrize("text", ["", "0", "2,", "3,x", "x=", "=2", "x=2,4", "x=2,x=4", "-2", "2.0"])
def test_a_mesh_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a mesh; write the sizes"):
        values.mesh_shape(text)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ("replicated", Replicated()),
        ("split", Split()),
        ("split:x", Split(("x",))),
        ("split:x+y", Split(("x", "y"))),
        ("x", ("x",)),
        ("-,x", (None, "x")),
        ("x+y,-", (("x", "y"), None)),
    ],
)
def test_layouts_are_read(spec, layout):
    glob, read = values.constraint(f"state/*={spec}")
    assert glob == "state/*"
    made = values.layout(read)
    assert (tuple(made) if isinstance(layout, tuple) else made) == layout


@pytest.mark.parametrize("text", ["state/*", "=x", "state/*=", "state/*=x,", "state/*=x;y", "state/*=split:", "a=1"])
def test_a_constraint_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not GLOB=SPEC"):
        values.constraint(text)


def test_missing_devices_are_told_with_the_way_to_get_them():
    with pytest.raises(ArgumentError, match="9 devices are asked for, JAX has 8 of platform cpu"):
        devices.devices_for(9)
