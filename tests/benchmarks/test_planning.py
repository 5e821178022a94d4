"""The benchmarks of planning run: hand plans, small programs, and a search that is told to stop, at sizes that take seconds."""

import argparse
import dataclasses
import functools
import json
import os
import signal
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost_model.hardware import preset
from autopar.inter_op.one_mesh import plan_on_one_mesh
from autopar.intra_op.compare_meshes import MeshComparison
from autopar.intra_op.planner import plan_step
from autopar.intra_op.request import logical_meshes
from autopar.solver.budget import SECONDS_PER_UNIT
from tests.benchmarks.scripts import SCRIPTS, load_script
from tests.even_links import even_links
from tests.inter_op.test_search import request_on, traced_step

TINY = "mlp --layers 2 --hidden 32 --batch 32 --devices 4 --cluster p3.16xlarge"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Load a benchmark as a module that is gone after the test, and so are the variables that it sets."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("AUTOPAR_CACHE", "off")

    return functools.partial(load_script, patch=monkeypatch)


def test_a_command_is_measured_and_its_plan_is_kept(load, tmp_path):
    script = load("planning_ordinary")
    outcome = script.run(TINY.split(), 300, tmp_path / "tiny.json")
    assert outcome.plan == json.loads((tmp_path / "tiny.json").read_text())
    assert outcome.cpu_seconds > 0
    assert 0.01 < outcome.gigabytes < 2
    assert "mesh" in script.describe(outcome.plan)
    assert "predicted step" in outcome.text


@pytest.mark.sweep
def test_a_command_that_takes_too_long_is_killed_and_one_that_fails_says_why(load):
    script = load("planning_ordinary")
    stopped = script.run(TINY.split(), 0.2)
    assert (stopped.plan, stopped.text) == (None, "no plan in 0 s")
    failed = script.run([*TINY.split(), "--memory-limit", "1KB"], 300)
    assert failed.plan is None
    assert "1.0 KB" in script.line("tiny", failed) or "memory" in failed.text


def test_every_case_is_one_that_the_command_line_takes(load):
    from autopar.commands.parser import read

    script = load("planning_ordinary")
    for arguments in script.CASES.values():
        read(["plan", *arguments.split()])
        if arguments.split()[0] in script.CAN_SCAN:
            read(["plan", *arguments.split(), "--scan-layers"])


@pytest.mark.slow
def test_hand_plans_are_fixed_as_they_say_and_the_open_plan_is_as_fast(load, capsys):
    script = load("hand_plans")
    given = argparse.Namespace(
        open_plans=None, planning_seconds=None, per_stage=[2], hands=["data *", "tensor 2", "2 *"]
    )
    rows = script.compare("small", script.SMALL["small-gpt"], given)
    assert [row.name for row in rows] == ["open", "data parallel", "tensor 2", "2 stages x 4"]
    assert [row.what.split(",")[0] for row in rows[1:]] == ["mesh 4", "mesh 2x2", "2 stages"]
    assert script.ratio(rows) <= 1 + script.TOLERANCE
    assert capsys.readouterr().out.count("\n") == 2 + len(rows) + 1


def test_megatron_splits_what_it_can_and_leaves_the_rest_whole(load):
    script = load("hand_plans")
    from autopar.commands.arguments.subject import find_subject

    subject = find_subject("moe", {"layers": 2, "hidden": 32, "heads": 2, "experts": 4, "vocab": 257})
    globs = {glob.removeprefix("state/params/"): spec for glob, spec in script.megatron(subject, 2).items()}
    assert globs["*/qkv/kernel"] == P(None, None, "model", None)
    assert globs["*/moe/up"] == P("model", None, None)
    assert "*/tokens/embedding" not in globs, "257 is odd"
    assert "*/qkv/kernel" not in {glob.removeprefix("state/params/") for glob in script.megatron(subject, 4)}, "2 heads"


def test_a_plan_that_does_not_fit_is_shown_as_such_and_a_faster_hand_plan_is_told(load):
    script = load("hand_plans")
    from autopar.commands.arguments.subject import Subject

    subject = Subject(lambda w, x: w - (x @ w).sum(), jnp.ones((64, 64)), jnp.ones((64, 64)))
    row, text = script.plan("tight", subject, {"devices": 2, "cluster": "cpu", "memory_limit_bytes": 64})
    assert (row.step_s, text) == (None, None)
    assert row.what.startswith("does not fit: ")
    open_row, by_hand = (script.Row(name=n, step_s=s, peak_bytes=0, cpu_s=0, wall_s=0, what="") for n, s in ROWS)
    assert script.ratio([open_row, by_hand, row]) == 2
    assert script.verdict([open_row, by_hand, row]).endswith("(best: by hand)  SLOWER")
    assert script.verdict([open_row, row]) == "no hand plan fits"


ROWS = (("open", 2.0), ("by hand", 1.0))


def test_moments_lie_between_a_tenth_of_the_budget_and_the_end_of_the_search(load):
    script = load("killed_planning")
    moments = script.draw_moments(0, 10, budget_s=60, ends_s=20)
    assert moments == script.draw_moments(0, 10, budget_s=60, ends_s=20)
    assert all(6 <= moment <= 20 for moment in moments)
    assert script.draw_moments(0, 10, budget_s=60, ends_s=5) == []


@pytest.mark.slow
def test_what_a_stopped_search_hands_over_is_checked(load, tmp_path):
    script = load("killed_planning")
    arguments = TINY.split()
    assert script.check(tmp_path / "none.json", arguments) == (None, "")
    (tmp_path / "broken.json").write_text("{}")
    assert script.check(tmp_path / "broken.json", arguments)[1].startswith("PlanError")
    command = script.command_of(arguments, tmp_path / "plan.json")
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "AUTOPAR_CACHE": "off"})
    step_s, error = script.check(tmp_path / "plan.json", arguments)
    assert error == ""
    assert step_s == pytest.approx(autopar.plan_from_json((tmp_path / "plan.json").read_text()).step_s)


@pytest.mark.slow
def test_a_search_that_is_told_to_stop_hands_over_a_plan(load):
    script = load("killed_planning")
    one = script.run([*script.SMALL["small"].split(), "--planning-seconds", "20"], signal.SIGTERM, 0.0, 300)
    assert one.status in (0, 143)
    assert one.cpu_s > 0


@pytest.mark.sweep
def test_small_programs_are_compiled_and_planned(load):
    script = load("small_programs")
    row = script.measure("operations", script.operations(0.9))
    assert min(row.jit_cpu_s, row.plan_cpu_s) > 0
    assert row.what.startswith("mesh")
    assert script.line(row).startswith("operations")


def test_the_small_programs_are_those_that_were_measured_before(load):
    script = load("small_programs")
    from autopar.models import MODELS

    assert set(MODELS) <= set(script.PROGRAMS)
    assert script.transformer().wishes == {"num_microbatches": 4}
    flow = script.flow()
    assert 320 <= len(jax.make_jaxpr(flow.step)(flow.state, flow.batch).eqns) <= 370


def test_a_flow_of_tiny_operations_takes_the_solver_little_work_and_a_third_axis_none(load):
    """Work is counted in units, the same each time: 0.05 s of them here, 0.2 s where a mesh of three axes is planned as well."""
    flow = load("small_programs").flow()
    request = dataclasses.replace(request_on(even_links()), meshes=logical_meshes(8))
    plan = plan_step(traced_step(flow.state, flow.batch, fun=flow.step), request).plan
    assert request.budget.spent * SECONDS_PER_UNIT < 0.1
    planned = {one.mesh_shape for one in plan.candidates if one.step_s is not None}
    assert (8,) in planned
    assert max(map(len, planned)) <= 2


def test_a_third_axis_that_may_win_takes_the_solver_no_more_than_its_share(load):
    """Where ranks wait for each other, small groups may be faster: then all meshes are searched, the last for half a second."""
    program = load("small_programs").operations(None)
    request = dataclasses.replace(request_on(preset("cpu")), meshes=logical_meshes(8))
    traced = traced_step(program.state, program.batch, fun=program.step)
    found = plan_on_one_mesh(traced, request, num_microbatches=1, recompute="none", devices=8)
    assert request.budget.spent * SECONDS_PER_UNIT < 1.0
    assert found.plan.mesh_shape == (2, 4)
    assert {one.mesh_shape for one in found.plan.candidates if one.step_s is not None} >= {(8,), (2, 4)}


def test_a_mesh_on_which_nothing_fits_is_searched_once_if_its_search_came_to_its_end(load, monkeypatch):
    """When every way has failed, the last one is planned again at any cost: only where more work could find something."""
    program, searched = load("small_programs").operations(), []
    traced = traced_step(program.state, program.batch, fun=program.step)
    search = MeshComparison._search_in_time
    spy = lambda self, mesh, request: searched.append((self.traced, mesh)) or search(self, mesh, request)  # noqa: E731
    monkeypatch.setattr(MeshComparison, "_search_in_time", spy)
    request = dataclasses.replace(request_on(even_links()), meshes=logical_meshes(8), memory_limit_bytes=1500)
    with pytest.raises(autopar.OutOfMemoryError):
        plan_on_one_mesh(traced, request, num_microbatches="auto", recompute="none", devices=8)
    assert len(searched) == len(set(searched)) >= 2
    searched.clear()
    hurried = dataclasses.replace(request, tuning=dataclasses.replace(request.tuning, first_work=1.0))
    with pytest.raises(autopar.OutOfMemoryError):
        plan_on_one_mesh(traced, hurried, num_microbatches="auto", recompute="none", devices=8)
    assert len(searched) > len(set(searched)), "what was left early is searched again"


@pytest.mark.parametrize(("share", "most_s"), [(None, 0.05), (0.9, 0.6)])
def test_fourteen_operations_take_the_solver_as_little_work_as_a_run_repays(load, share, most_s):
    """Of a mesh of three axes their classes give a bound near the plan's; what is open within 0.9 of the memory is left open."""
    program = load("small_programs").operations()
    free = autopar.parallelize(program.step, devices=8, cluster=even_links()).plan(program.state, program.batch)
    limit = None if share is None else int(share * free.peak_bytes)
    request = dataclasses.replace(request_on(even_links()), meshes=logical_meshes(8), memory_limit_bytes=limit)
    traced = traced_step(program.state, program.batch, fun=program.step)
    found = plan_on_one_mesh(traced, request, num_microbatches=1, recompute="none", devices=8)
    assert request.budget.spent * SECONDS_PER_UNIT < most_s
    assert found.plan.lower_bound_s > 0.7 * found.plan.step_s
