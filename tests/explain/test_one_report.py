"""A plan says the same of itself in every form: one line, one page, the report, its JSON, and `simulate --plan`."""

import dataclasses
import json

import jax
import pytest

import autopar
from autopar.__main__ import main
from autopar.cost_model.hardware import preset
from autopar.explain import explain, seconds_text
from autopar.explain.figures import figures_of, parts_of
from autopar.explain.memory import TITLE
from autopar.explain.stages import RANGES
from autopar.explain.units import bytes_text
from autopar.models.registry import build
from autopar.plan import WITHIN, CollectivePlan
from tests.explain.test_pipelines import TRANSFERS, pipeline_of, stage_of, two_stages
from tests.plan_examples import BATCH, collective, layer_stack, leaf, plan_of, rows_of

MODES = {
    "one mesh": {"devices": 4, "mesh_shape": (2, 2)},
    "stages": {"devices": 4, "num_stages": 2, "num_microbatches": 4, "mesh_shape": (2,)},
    "stages that share meshes": {
        "devices": 4,
        "mesh_shape": (2,),
        "num_stages": 2,
        "num_microbatches": 4,
        "schedule": "interleaved",
    },
}


@pytest.fixture(scope="module", params=MODES)
def planned(request):
    model = build("gpt", layers=2, hidden=64, heads=4, batch=16, seq=32, vocab=256)
    state = jax.eval_shape(lambda: model.create_state(jax.random.key(0)))
    step = autopar.parallelize(model.train_step, cluster="dgx-a100-80gb", plan_cache=False, **MODES[request.param])
    return step.plan(state, model.batch_shape())


def simulated(plan, tmp_path, capsys) -> tuple[str, dict]:
    """What `simulate --plan` prints and says in JSON, on the plan's own cluster."""
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    command = ["simulate", "--plan", str(path), "--cluster", plan.cluster]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_collectives_that_copy_into_another_order_take_as_long_in_simulate_as_in_their_plan(tmp_path, capsys):
    model = build("gpt")
    state = jax.eval_shape(lambda: model.create_state(jax.random.key(0)))
    step = autopar.parallelize(model.train_step, devices=8, mesh_shape=(2, 4), cluster="cpu", plan_cache=False)
    plan = step.plan(state, model.batch_shape())
    assert any(item.is_transposed for item in plan.collectives)
    _, priced = simulated(plan, tmp_path, capsys)
    assert all(kind["planned_s"] == pytest.approx(kind["seconds"], rel=1e-9) for kind in priced["communication"])


@pytest.mark.sampled(4)
def test_compute_communication_and_memory_agree_in_header_tables_json_and_simulate(planned, tmp_path, capsys):
    figures, text, page = figures_of(planned), explain(planned), str(planned)
    printed, priced = simulated(planned, tmp_path, capsys)
    sums = priced["communication"]
    assert priced["planned_compute_s"] == pytest.approx(figures.compute_s, rel=1e-9)
    assert sum(kind["planned_s"] for kind in sums) == pytest.approx(figures.comm_s, rel=1e-9)
    assert sum(kind["seconds"] for kind in sums) == pytest.approx(figures.comm_s, rel=1e-9)
    assert priced["planned_hidden_s"] == pytest.approx(figures.hidden_s, rel=1e-9, abs=1e-15)
    assert (priced["planned_step_s"], priced["peak_bytes"]) == (figures.step_s, figures.peak_bytes)
    shown = {row[0]: row[1:] for row in rows_of(f"\n{printed}", printed.splitlines()[0])}
    compute, comm = seconds_text(figures.compute_s), seconds_text(figures.comm_s)
    assert shown["compute"][:2] == [compute, compute]
    assert shown["communication"] == [comm, comm]
    assert shown["step"][0] == seconds_text(figures.step_s)
    where = "mesh" if getattr(planned, "virtual_stages", 1) > 1 else "stage"
    for form in (text, page):
        header = " ".join(form.split("\n- ")[0].split())
        assert f"predicted step {seconds_text(figures.step_s)}" in header
        assert f"peak memory {bytes_text(figures.peak_bytes)} per device" in header
        assert f"{compute} compute" in header or f"compute {compute} on the slowest {where}" in header
        assert f"{comm} communication" in header or f"communication {comm} in all stages" in header
        assert rows_of(form, "Time of the step")[-1][-1] == seconds_text(figures.step_s)
    assert bytes_text(figures.peak_bytes) in printed
    again = autopar.plan_from_json(planned.to_json())
    assert (figures_of(again), explain(again)) == (figures, text)


def test_the_parts_of_a_step_add_up_to_it_and_its_collectives_to_its_communication(planned):
    links = {tier.name for tier in preset(planned.cluster).tiers}
    assert sum(part.waited_s for part in parts_of(planned)) == pytest.approx(planned.step_s, rel=1e-9)
    for plan in [planned] if isinstance(planned, autopar.Plan) else [stage.plan for stage in planned.stages]:
        assert sum(c.count * c.predicted_s for c in plan.collectives) == pytest.approx(plan.comm_s, rel=1e-9)
        assert sum(c.count * c.hidden_s for c in plan.collectives) == pytest.approx(plan.hidden_s, rel=1e-9, abs=1e-15)
        assert max(plan.memory_bytes) == plan.peak_bytes
        assert all(c.algorithm and c.link in links for c in plan.collectives)


def test_the_flops_of_a_step_are_those_of_its_products_and_the_mfu_their_part_of_the_peak(planned):
    tokens, hidden, vocab, seq = 16 * 32, 64, 256, 32
    forward = 2 * (2 * tokens * 12 * hidden**2 + 2 * 2 * tokens * seq * hidden) + 2 * tokens * hidden * vocab
    assert planned.flops == pytest.approx(3 * forward, rel=1e-9)
    assert figures_of(planned).mfu == pytest.approx(planned.at_peak_s / planned.step_s)
    assert figures_of(dataclasses.replace(planned, at_peak_s=0.0)).mfu is None


def test_operations_are_named_by_their_modules_and_by_the_leaves_they_move(planned):
    plans = [planned] if isinstance(planned, autopar.Plan) else [stage.plan for stage in planned.stages]
    scopes = {item.scope for plan in plans for item in plan.collectives}
    leaves = {value.path for plan in plans for value in (*plan.inputs, *plan.outputs)}
    modules = {scope for scope in scopes if scope not in leaves}
    assert any(scope.startswith("block_") for scope in modules), scopes
    assert not [scope for scope in modules if scope.startswith("GPT")]
    sources = {item.source for plan in plans for item in plan.collectives}
    assert not [source for source in sources if "/autopar/" in source and "/models/" not in source]


@pytest.mark.sampled(4)
def test_a_page_and_a_line_of_any_plan_are_short(planned):
    many = plan_of(
        *layer_stack(64), BATCH, collectives=tuple(collective("all-reduce", "x", source=f"m:{n}") for n in range(99))
    )
    wide = pipeline_of(
        *(stage_of(n, *layer_stack(n + 1), forward_s=1e-3 * (n + 1)) for n in range(64)), transfers=TRANSFERS
    )
    for plan in (planned, many, wide):
        assert str(plan).count("\n") < 40
        assert max(map(len, str(plan).splitlines())) < 180
        assert "plan.show() prints the whole report" in str(plan)
        assert repr(plan).startswith(f"<{type(plan).__name__}: ")
        assert "\n" not in repr(plan)


def test_show_prints_what_autopar_plan_prints(planned, tmp_path, capsys):
    planned.show()
    shown = capsys.readouterr().out
    path = tmp_path / "plan.json"
    path.write_text(planned.to_json(), encoding="utf-8")
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == shown


def test_sixteen_equal_stages_are_a_row_and_fit_sixty_lines():
    stages = [
        stage_of(n, *layer_stack(2), BATCH, peak_bytes=(20 - n) * 2**30, microbatches_in_flight=16 - n)
        for n in range(16)
    ]
    sent = tuple(dataclasses.replace(TRANSFERS[0], source=n, target=n + 1) for n in range(15))
    back = tuple(dataclasses.replace(TRANSFERS[1], source=n + 1, target=n) for n in range(15))
    plan = pipeline_of(*stages, transfers=(*sent, *back), num_microbatches=16)
    text = explain(plan)
    assert text.count("\n") <= 60
    rows = rows_of(text, f"Stages (forward and backward per microbatch; {RANGES})")
    assert [row[0] for row in rows] == ["0 to 15"]
    assert rows[0][-2:] == ["1 to 16", "5.0 GiB to 20.0 GiB"]
    crossing = rows_of(text, "Transfers between meshes per step")
    assert crossing[0][:4] == ["stages 0 to 14", "the next stage", "forward", "60"]
    assert crossing[1][:4] == ["stages 1 to 15", "the stage before", "backward", "60"]
    assert crossing[2][:2] == ["all", "120"]
    assert len(rows_of(explain(plan, full=True), "Stages (forward and backward per microbatch)")) == 16


def test_eight_stages_of_unequal_layers_fit_two_pages_with_the_picture_of_their_schedule():
    counts = (4, 5, 6, 7, 8, 5, 6, 7)
    stages = [
        stage_of(
            n,
            *(dataclasses.replace(one, path=one.path.replace("block_", f"block_{n}")) for one in layer_stack(count)),
            dataclasses.replace(BATCH, from_forward=n > 0),
            forward_s=1e-3 * count,
            microbatches_in_flight=8 - n,
            peak_bytes=(20 - n) * 2**30,
            state_bytes=count * 2**30,
            microbatch_bytes=count * 2**20,
        )
        for n, count in enumerate(counts)
    ]
    stages = [
        dataclasses.replace(
            one, plan=dataclasses.replace(one.plan, collectives=(collective("all-reduce", "x"),) * count)
        )
        for one, count in zip(stages, counts, strict=True)
    ]
    sent = tuple(
        dataclasses.replace(one, source=n, target=m, bytes=one.bytes + n)
        for one in TRANSFERS
        for n, m in [(n, n + 1) if one.source < one.target else (n + 1, n) for n in range(7)]
    )
    text = explain(pipeline_of(*stages, transfers=sent, num_microbatches=16), schedule_grid="mesh 0 | F0\n" * 8)
    assert text.count("\n") <= 80
    assert len(rows_of(text, "Stages (forward and backward per microbatch)")) == 8
    assert "- stages 0 to 7: collectives over x: 4 to 8 all-reduce, 4.0 KiB to 8.0 KiB" in text
    assert [row[0] for row in rows_of(text, f"{TITLE} ({RANGES})")] == ["0", "1 to 7"]
    assert len(rows_of(explain(pipeline_of(*stages), full=True), "Memory at the peak")) == 8
    crossing = rows_of(text, "Transfers between meshes per step")
    assert [row[2] for row in crossing[:-1]] == ["forward", "backward", "update", "shared weights"]
    assert crossing[2][3:5] == ["7", "4 B to 10 B"]


def test_stages_that_differ_have_rows_of_their_own():
    rows = rows_of(explain(pipeline_of(*two_stages(forward_s=2e-3))), "Stages (forward and backward per microbatch)")
    assert [row[0] for row in rows] == ["0", "1"]


def test_what_hides_within_operations_is_a_part_of_the_step_on_every_cluster(tmp_path, capsys):
    item = CollectivePlan(
        kind="collective-permute", axes=("x",), bytes=2**20, count=4, operand="float32[7]", source="m.py:7",
        predicted_s=1e-3, hidden_s=0.75e-3, overlap=WITHIN,
    )  # fmt: skip
    plan = plan_of(BATCH, collectives=(item,), comm_s=4e-3, hidden_s=3e-3, cluster="dgx-h100", memory_limit_bytes=None)
    assert [(part.name, part.hidden_s) for part in parts_of(plan)] == [
        ("compute", 0.0),
        ("communication: within operations", 3e-3),
    ]
    _, priced = simulated(plan, tmp_path, capsys)
    seconds = priced["communication"][0]["seconds"]
    assert priced["hidden_s"] == pytest.approx(0.75 * seconds)
    assert priced["step_s"] == pytest.approx(plan.compute_s + 0.25 * seconds)


def test_titles_of_narrow_tables_keep_to_their_line():
    lines = str(plan_of(leaf("w", (8,), (("x",),)), BATCH)).splitlines()
    assert lines[lines.index("Largest leaves of the state") + 1].split() == ["leaf", "layout", "per", "device"]
