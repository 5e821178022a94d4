"""The classic plans and better machines: each price is that of the plan that its words ask for."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.__main__ import main
from autopar.cost_model.hardware import preset
from autopar.errors import PlanError
from autopar.layouts.constraints import SplitBatch
from autopar.progress import listening
from autopar.why.what_if import MORE_BYTES, reached_tiers
from tests.commands.documents import document

SETTINGS = {"devices": 4, "cluster": "p3.16xlarge", "plan_cache": False}
OPTIMIZER = optax.adam(1e-3)


def train_step(state, batch):
    def loss_of(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def shapes():
    sizes = {"up": (64, 4096), "down": (4096, 64)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    state = {"params": params, "opt_state": jax.eval_shape(OPTIMIZER.init, params)}
    return state, {name: jax.ShapeDtypeStruct((4096, 64), jnp.float32) for name in ("x", "y")}


def planned(**changes):
    return autopar.parallelize(train_step, **{**SETTINGS, **changes}).plan(*shapes())


@pytest.fixture(scope="module")
def plan():
    return planned()


@pytest.fixture(scope="module")
def classic(plan):
    return plan.classic()


@pytest.mark.filterwarnings("ignore:.* of the forward work is one operation")
def test_each_classic_plan_costs_what_it_costs_when_its_arguments_are_given(plan, classic):
    line = {"mesh_shape": {"data": 4}}
    by_hand = {
        "data parallel": {**line, "constraints": autopar.data_parallel()},
        "ZeRO-2": {**line, "constraints": autopar.zero2()},
        "ZeRO-3": {**line, "constraints": autopar.zero3()},
        "tensor parallel, 4 ways": {"mesh_shape": {"model": 4}, "constraints": {"batch/*": SplitBatch(())}},
        "pipeline of 4 stages": {"num_stages": 4, "schedule": "1f1b", "virtual_stages": 1},
    }
    rows = {row.name: row for row in classic.rows}
    assert list(rows) == list(by_hand)
    for name, arguments in by_hand.items():
        try:
            other = planned(**arguments)
        except autopar.AutoparError:
            assert rows[name].step_s is None
            continue
        assert other.step_s == pytest.approx(rows[name].step_s, rel=1e-9)
        assert other.peak_bytes == rows[name].peak_bytes
        assert other.step_s >= plan.step_s * (1 - 1e-9)


def test_tensor_parallel_devices_have_the_same_examples(classic):
    tensor = next(row for row in classic.rows if row.name.startswith("tensor"))
    forced = planned(mesh_shape={"model": 4}, constraints={"batch/*": SplitBatch(())})
    assert forced.step_s == tensor.step_s
    assert all(value.spec == ((), ()) for value in forced.inputs if value.role == "batch")
    assert forced.input("state/params/up").spec == ((), ("model",))
    assert forced.input("state/params/down").spec == (("model",), ())


def test_each_better_machine_costs_what_a_plan_under_that_cluster_costs(plan):
    memory, link = plan.what_if().rows
    assert memory.name == "1 GiB more memory per device"
    assert planned(memory_limit_bytes=plan.memory_limit_bytes + MORE_BYTES).step_s == memory.step_s
    assert link.name == "2x bandwidth of NVLink2"
    machine = preset("p3.16xlarge")
    tier = machine.tiers[0]
    twice = dataclasses.replace(
        tier, bytes_per_s=2 * tier.bytes_per_s, fallback_bytes_per_s=2 * tier.fallback_bytes_per_s
    )
    faster = dataclasses.replace(machine, tiers=(twice, *machine.tiers[1:]))
    assert planned(cluster=faster).step_s == link.step_s
    assert link.step_s < plan.step_s


def test_more_memory_buys_what_the_limit_takes():
    free = planned(num_stages=1)
    tight = planned(num_stages=1, memory_limit_bytes=free.peak_bytes // 2)
    memory = tight.what_if().rows[0]
    assert tight.peak_bytes <= free.peak_bytes // 2
    assert memory.step_s == pytest.approx(free.step_s, rel=1e-9)
    assert memory.step_s < tight.step_s


@pytest.mark.parametrize(("devices", "tiers"), [(1, []), (2, [0]), (8, [0]), (9, [0, 1]), (64, [0, 1])])
def test_only_links_between_the_devices_are_asked_about(devices, tiers):
    assert reached_tiers(preset("p3.16xlarge"), devices) == tiers


def test_show_adds_what_is_asked_for(plan, classic, capsys):
    plan.show(what_if=True)
    text = capsys.readouterr().out
    assert text.endswith(f"\n{plan.what_if()}\n")
    assert "\nWhat a better machine would buy, planned on it\n" in text
    lines = str(classic).splitlines()
    assert lines[0] == "The classic plans, each planned on as many devices"
    assert lines[2].startswith("this plan ")
    assert [line.split("  ")[0] for line in lines[3:]] == [row.name for row in classic.rows]


def test_one_device_has_nothing_to_compare_and_a_file_knows_no_step(plan):
    assert str(planned(devices=1).classic()) == "One device: there is nothing to compare with."
    for question in (autopar.plan_from_json(plan.to_json()).classic, autopar.plan_from_json(plan.to_json()).what_if):
        with pytest.raises(PlanError, match="this plan is data alone, from a file"):
            question()


@pytest.mark.sweep
def test_the_command_line_asks_for_both(capsys):
    model = ["mlp", "--layers", "2", "--hidden", "32", "--batch", "32", "--devices", "2", "--cluster", "p3.16xlarge"]
    assert main(["explain", *model, "--mesh", "2", "--classic", "--what-if"]) == 0
    text = capsys.readouterr().out
    assert "\nThe classic plans, each planned on as many devices\n" in text
    assert "\n2x bandwidth of NVLink2" in text


@pytest.mark.sweep
def test_the_page_has_a_section_for_what_is_asked(plan, classic):
    page = plan.html(classic=True, what_if=True)
    assert "<h2>The classic plans, each planned on as many devices</h2>" in page
    assert "<h2>What a better machine would buy, planned on it</h2>" in page
    for row in (*classic.rows, *plan.what_if().rows):
        assert row.name in page
    assert "The classic plans" not in plan.html()
    assert "there is nothing to compare with" in planned(devices=1).html(classic=True)


@pytest.mark.sweep
def test_the_command_line_writes_both_as_json_and_onto_the_page(capsys, tmp_path):
    model = ["mlp", "--layers", "1", "--hidden", "32", "--batch", "32", "--devices", "2", "--cluster", "p3.16xlarge"]
    page = tmp_path / "plan.html"
    given = [*model, "--mesh", "2", "--classic", "--what-if", "--html", str(page)]
    found = document(capsys, "plan", *given)
    assert [row["name"] for row in found["classic"]][:3] == ["data parallel", "ZeRO-2", "ZeRO-3"]
    assert found["what_if"][-1]["name"] == "2x bandwidth of NVLink2"
    assert all(row["step_s"] >= found["step_s"] * (1 - 1e-9) for row in found["classic"] if row["step_s"])
    text = page.read_text()
    assert "<h2>The classic plans" in text
    assert "<h2>What a better machine would buy" in text
    assert "classic" not in document(capsys, "plan", *model, "--mesh", "2")


@pytest.mark.parametrize("ask", ["classic", "what_if"])
def test_each_search_for_a_plan_beside_is_told_by_its_number(plan, ask):
    heard = []
    with listening(heard.append):
        rows = getattr(plan, ask)().rows
    searches = [progress.search for progress in heard if progress.search is not None]
    assert searches == [f"{row.name}, {number} of {len(rows)}" for number, row in enumerate(rows, 1)]
