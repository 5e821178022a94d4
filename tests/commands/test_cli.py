"""The command line as a user meets it: what it prints and writes, how it fails, how it helps."""

import json
import sys
from inspect import signature
from pathlib import Path

import pytest

import autopar
from autopar.commands import parser
from autopar.explain import explain
from autopar.plan import Plan
from autopar.schedules.schedules import SCHEDULES
from tests.commands.command_line import SMALL, planned, run, start

# --- plan and show ----------------------------------------------------------------------------------------------------


def test_plan_prints_the_plan_that_it_writes_and_show_prints_it_again(tmp_path, capsys):
    plan = planned(tmp_path)
    printed = capsys.readouterr().out
    assert plan.mesh_shape in {(8,), (2, 4), (4, 2)}
    report, end = printed.rsplit("\n\n", 1)
    assert [line.rstrip() for line in report.splitlines()] == explain(plan).splitlines()
    assumed = "planned for virtual CPU devices, the preset cpu; --cluster names another machine\n"
    assert end == f"{assumed}plan written to {tmp_path / 'plan.json'}\n"
    assert run("show", tmp_path / "plan.json", "--full") == 0
    shown = capsys.readouterr().out
    assert [line.rstrip() for line in shown.splitlines()] == explain(plan, full=True).splitlines()


def test_plan_needs_no_devices(tmp_path):
    file = str(tmp_path / "plan.json")
    process = start("plan", "mlp", *SMALL, "--devices", "1024", "-o", file, JAX_PLATFORMS="no_such_platform")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "(1024 devices)" in output
    plan = Plan.from_json(Path(file).read_text())
    assert plan.step_s <= plan.one_mesh_bound_s * (1 + 1e-6)


def test_plan_takes_sizes_mesh_and_limits_from_its_flags(tmp_path):
    plan = planned(
        tmp_path, "--mesh", "data=2,model=2", "--memory-limit", "1MiB", "--outputs", "24", "--cluster", "h200"
    )
    assert (plan.mesh_shape, plan.axis_names) == ((2, 2), ("data", "model"))
    assert (plan.memory_limit_bytes, plan.cluster) == (2**20, "h200")
    assert plan.input("state/params/Dense_1/kernel").shape == (16, 24)
    assert plan.input("batch/inputs").shape == (16, 16)


def test_plan_uses_only_the_collectives_it_may_and_repeats_the_work_it_is_told_to(tmp_path):
    flags = ("--collectives", "all-reduce, all-gather", "--recompute", "layer")
    plan = planned(tmp_path, "--mesh", "4", "--zero", "2", "--layers", "4", "--batch", "1024", *flags)
    assert {one.kind for one in plan.collectives} <= {"all-reduce", "all-gather"}
    assert plan.recompute


NOT_FLAGS = {
    "fun": "MODEL",
    "batch_argnums": "a model's step takes state and batch",
    "donate_argnums": "a model's step returns its state",
    "static_argnums": "a model's step has none",
    "static_argnames": "a model's step has none",
    "plan": "`show` and `simulate` read plans",
    "follow": "there is one step",
    "max_programs": "there is one program",
}
FLAGS = {
    "mesh_shape": "mesh",
    "constraints": "constraint",
    "memory_limit_bytes": "memory_limit",
    "plan_cache": "plan_cache",
}


def test_the_command_line_has_a_flag_for_whatever_parallelize_leaves_open():
    options = vars(parser.read(["plan", "mlp"]))
    asked = {
        FLAGS.get(name, name.removeprefix("num_"))
        for name in signature(autopar.parallelize).parameters
        if name not in NOT_FLAGS
    }
    assert asked <= options.keys()


def test_a_plan_is_shown_also_where_a_shell_says_that_it_has_no_columns(tmp_path, capsys, monkeypatch):
    plan = planned(tmp_path)
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "0")
    assert run("show", tmp_path / "plan.json") == 0
    shown = capsys.readouterr().out
    assert [line.rstrip() for line in shown.partition("\n\nOverlap with compute")[0].splitlines()] == explain(
        plan
    ).splitlines()


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
    first, second, third = (planned(tmp_path, "--mesh", "4", "--zero", stage) for stage in ("1", "2", "3"))
    assert any(first.input(moments).spec)
    assert "reduce-scatter" not in {one.kind for one in first.collectives}
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

def of_three_arguments():
    return lambda params, opt_state, batch: params, {}, {}
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
    assert run("plan", "own_step_of_a_user:of_three_arguments") == 2
    told = capsys.readouterr().err
    assert (
        "takes params, opt_state, batch, but the command line calls it with a state and a batch: make one tree" in told
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "the following arguments are required: COMMAND (see autopar --help)"),
        ("plam gpt", "invalid choice: 'plam'"),
        ("pln gpt", "; did you mean plan? (see autopar --help)"),
        (
            "plan",
            "required: MODEL, which is mlp, gpt, gpt_scan, moe, wide_resnet, bert, t5, llama, unet, densenet, or module:f",
        ),
        (
            "bench",
            "as in `autopar bench gpt`: measure the step of a plan beside jax.jit on one device, in turns (see autopar",
        ),
        (
            "plan gtp",
            "no model 'gtp'; did you mean gpt? The models are mlp, gpt, gpt_scan, moe, wide_resnet, bert, t5, llama, unet, "
            "densenet; for a step",
        ),
        ("plan gpt --layer 2", "plan gpt has no argument '--layer'; did you mean --layers?"),
        ("plan gpt --ffn_factor 2", "plan gpt has no argument '--ffn_factor'; did you mean --ffn-factor?"),
        (
            "plan gpt --zzz",
            "plan gpt has no argument '--zzz'; it takes --allow-redundant-compute, --aux-metrics, --batch,",
        ),
        ("plan --hidden 2 gpt", "plan, without MODEL right after plan, has no argument '--hidden'"),
        ("plan gpt extra", "plan gpt has no argument 'extra'"),
        (
            "plan gpt --size 40B",
            "argument --size: no size '40B' of gpt: the published ones are 125M, 350M, 760M, 1.3B,",
        ),
        ("plan mlp --size 1B", "plan mlp has no argument '--size'; "),
        ("plan mlp --sgd --optimizer lion", "sgd is set and optimizer is 'lion': give only one"),
        ("plan mlp --optimizer adm", "did you mean adam? (see autopar plan --help)"),
        ("plan mlp --nodes 2", "--nodes needs --cluster, which says how many devices a machine has; or give --devices"),
        ("plan mlp --nodes 2 --cluster cpu", "cluster cpu joins any number of devices and has no machines to count"),
        (
            "plan mlp --nodes 2 --cluster dgx-h100 --devices 8",
            "--nodes 2 of dgx-h100 have 16 devices and --devices is 8",
        ),
        (
            "plan mlp --nodes 1 --cluster dgx-h100 --mesh 4",
            "--mesh has 4 devices and --nodes 1 have 8: make them agree",
        ),
        ("plan gpt --layers two", "argument --layers: 'two' is not a whole number"),
        ("plan gpt --dropout x", "argument --dropout: 'x' is not a number"),
        ("plan gpt --heads 3", "hidden is 128 and heads is 3, but heads must divide hidden"),
        ("plan gpt --mesh 3,x", "argument --mesh: '3,x' is not a mesh; write the sizes of its axes, such as 2,4, or"),
        ("plan gpt --devices 0", "argument --devices: '0' is not a whole number of at least 1"),
        (
            "plan gpt --memory-limit 16XB",
            "argument --memory-limit: '16XB' is not a size; write a number and one of B, KB",
        ),
        ("plan gpt --memory-limit -1GB", "argument --memory-limit: '-1GB' is not a size; write a number and one of B"),
        ("train mlp --seed -1x", "argument --seed: invalid int value: '-1x'"),
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
        ("plan mlp --stages 2 --microbatches 3", "--microbatches 3 does not divide the examples of the batch"),
        (
            "plan mlp --stages 3",
            "8 devices cannot be shared equally by 3 stages; use 1 or 2 or 4 or 8 stages, or give each",
        ),
        ("plan mlp --devices 1 --stages 2", "2 stages need a device each, and there is 1 device: use more devices or"),
        ("plan mlp --devices 3 --stages 4", "4 stages need a device each, and there are 3 devices: use more devices"),
        (
            "plan mlp --zero 3 --data-parallel",
            "--data-parallel keeps the whole state on each device, and --zero 3 splits it: give only one",
        ),
        ("train mlp --zero 1 --data-parallel", "--zero 1 splits it: give only one"),
        ("rank mlp --clusters cpu --zero 1 --data-parallel", "--zero 1 splits it: give only one"),
        ("plan gpt --zero 4", "argument --zero: invalid choice: 4"),
        ("plan gpt --constraint state/w", "'state/w' is not GLOB=SPEC; SPEC is, for each dimension, an axis"),
        ("plan mlp --constraint nosuch/*=x", "constraint 'nosuch/*' matches no leaf of the step's arguments"),
        ("plan mlp --constraint batch/inputs=model,-", "names mesh axis 'model'; the mesh has x"),
        (
            "plan mlp --mesh a=2,b=4 --constraint state/params/*/kernel=model,-",
            "the mesh has a, b: use these names, or give it your own, as with --mesh data=2,model=4\n",
        ),
        ("plan mlp --mesh 2 --memory-limit 1KB", "no plan fits"),
        ("plan mlp -o nosuch/plan.json", "cannot write nosuch/plan.json: there is no folder nosuch"),
        ("plan mlp -o .", "cannot write .: it is a folder. Name a file in it"),
        ("plan nosuch.module:step", "cannot find 'nosuch.module:step': No module named 'nosuch'"),
        ("plan json:nosuch", "has no attribute 'nosuch'; give an importable module:function"),
        ("plan json:__name__", "'json:__name__' must be a function without required arguments"),
        ("plan json:dumps", "'json:dumps' must be a function without required arguments"),
        (
            "explain nosuch.json --leaf batch/x",
            "a plan file has no step to search again, which --leaf does: name the model",
        ),
        ("show nosuch.json", "cannot read nosuch.json: No such file or directory"),
        ("show .", "cannot read .: Is a directory"),
        ("run mlp", "run takes the file of the plan before MODEL: `autopar run plan.json mlp`\n"),
        ("run mlp a.json --steps 3", "run takes the file of the plan before MODEL: `autopar run a.json mlp`\n"),
        ("run json:dumps a.json", "run takes the file of the plan before MODEL: `autopar run a.json json:dumps`\n"),
        ("run a.json", "for a step of your own, as in `autopar run plan.json gpt`: make a few steps"),
        (
            "run a.json mlp --devices 2",
            "has no --devices: leave it out, or plan again with it, as in `autopar plan mlp --dev",
        ),
        ("run a.json --hidden 32", "run, without FILE MODEL right after run, has no argument '--hidden'"),
        ("run a.json mlp --step 3", "run mlp has no argument '--step'; did you mean --steps?"),
        ("run a.json mlp", "cannot read a.json: No such file or directory"),
        ("train gtp", "no model 'gtp'"),
        ("train mlp --steps 0", "argument --steps: '0' is not a whole number of at least 1"),
        ("train mlp --seed x", "argument --seed: invalid int value: 'x'"),
        ("train mlp --mesh 2 --devices 4", "--mesh has 2 devices and --devices is 4"),
        ("train mlp --devices 512 --steps 1", "512 devices are asked for, JAX has 8 of platform cpu; XLA_FLAGS is"),
        ("train mlp --steps 1 --log nosuch/log.csv", "cannot write nosuch/log.csv: there is no folder nosuch"),
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
        (b"not json", "not a plan: line 1 is not JSON: Expecting value"),
        (b"[]", "a JSON object with a 'version' is expected; `autopar plan MODEL -o FILE` writes one\n"),
        (b'{"version": 99}', "plan of version 99"),
        (b'{"version": 1}', "a plan of version 1, this autopar reads version 2: plan again"),
        (b'{"kind": "pipeline"}', "a JSON object with a 'version' is expected"),
        (b'{"kind": "pipeline", "version": 99}', "plan of version 99, this autopar reads version 2: plan again"),
        (
            b'{"kind": "pipeline", "version": 2}',
            "not a plan of version 2: the file lacks 'fingerprint', 'trail', 'cluster',",
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
        ("--help", "train a model on real data, or your own step, under a plan"),
        ("plan --help", "module:function"),
        ("plan moe --help", "--capacity-factor FLOAT"),
        ("plan gpt --help", f"--schedule {{auto,{','.join(sorted(SCHEDULES))}}}"),
        ("train gpt --help", "--timeline FILE"),
        ("train wide_resnet --help", "--imagenet-stem, --no-imagenet-stem"),
    ],
)
def test_help_and_version_go_to_standard_output_with_status_0(command, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*command.split())
    assert stopped.value.code == 0
    assert words in capsys.readouterr().out


def test_every_public_name_is_there_when_it_is_used_and_others_are_told():
    assert {name for name in autopar.__all__ if getattr(autopar, name).__module__.startswith("autopar.")} == {
        *autopar.__all__
    }
    assert {*autopar.__all__} <= {*dir(autopar)}
    with pytest.raises(AttributeError, match=r"module 'autopar' has no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018


def test_a_published_size_stands_for_its_fields_and_flags_override_it():
    sizes = parser.read(["plan", "gpt", "--layers", "2", "--size", "39b"]).sizes
    assert (sizes["hidden"], sizes["layers"], sizes["dtype"], sizes["batch"]) == (8192, 2, "float16", 1024)
    assert parser.read(["train", "llama", "--size", "405B"]).sizes["ffn"] == 53248


@pytest.mark.sweep
def test_nodes_are_as_many_devices_as_the_cluster_has_in_each(tmp_path):
    plan = planned(tmp_path, "--nodes", "2", "--cluster", "dgx-h100", "--data-parallel", "--stages", "1")
    assert plan.num_devices == 16
