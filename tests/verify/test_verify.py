"""A compiled step does what its plan says; where it does not, a verification says which figure is wrong, and by how much."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.explain.verified import page
from autopar.files.checked import VERIFICATION_SCHEMA, check_fields
from autopar.intra_op.lowering import per_device
from autopar.intra_op.memory.model import MemoryModel
from autopar.layouts.perform import perform_move
from autopar.verification import Verification, VerifiedRow
from tests.libraries.modes import MODES
from tests.verify.steps import arguments, shapes, step_in, train_step
from tests.zoo import ZOO


def parallel(**options):
    return autopar.parallelize(train_step, **options)


def rows_of(verification, topic):
    return [row for row in verification.rows if row.topic == topic]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_compiled_as_it_is_planned_in_every_mode(mode):
    found = step_in(mode).verify(*arguments())
    assert found.check() is found
    assert {"memory", "arithmetic"} <= {row.topic for row in found.rows}
    assert all(row.verdict == "matches" for row in rows_of(found, "collectives")), str(found)
    assert rows_of(found, "collectives") or mode == "default"
    assert bool(rows_of(found, "transfers")) == (mode == "stages")


NOT_IN_MICROBATCHES = {("resnet_block", "microbatches"), ("resnet_block", "stages")}
"""Batch normalisation of the whole batch."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in ZOO for mode in MODES if (name, mode) not in NOT_IN_MICROBATCHES],
)
def test_every_model_is_compiled_as_it_is_planned_in_every_mode(name, mode):
    step, state, batch = ZOO[name]()
    found = autopar.parallelize(step, **MODES[mode]).verify(state, batch, values=True)
    assert found.check() is found
    assert not [row for row in found.rows if row.verdict == "unknown"], str(found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["bert", "unet"])
def test_a_plan_that_recomputes_layers_promises_no_memory_that_the_program_exceeds(name):
    """Of bert the weights that are copied and the gradients that are computed twice were not counted, of unet the places of a
    pooling."""
    step, state, batch = ZOO[name]()
    found = autopar.parallelize(step, **MODES["recompute"]).verify(state, batch)
    (peak,) = (one for one in rows_of(found, "memory") if one.what == "peak")
    assert peak.verdict == "matches", str(found)
    assert peak.planned >= 0.92 * peak.compiled


@pytest.mark.parametrize("mode", ["zero3", "stages"])
def test_values_are_those_of_one_device_and_the_arguments_are_not_consumed(mode):
    state, batch = arguments()
    found = step_in(mode).verify(state, batch, values=True)
    compared = rows_of(found, "values")
    assert [row.what for row in compared][-1] == "output/1"
    assert len(compared) == 1 + len(jax.tree.leaves(state))
    assert found.ok, str(found)
    assert all(0 < row.planned <= 1e-3 for row in compared)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, batch)))


def two_products_a_layer(weights, x):
    """Layers that hand on less than their backward reads, so that doing their work again saves memory."""

    def loss(weights):
        h = x
        for w in weights:
            h = h + jnp.tanh(jnp.tanh(h @ w) @ w.T)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def test_what_devices_do_again_is_told():
    options = {"devices": 2, "mesh_shape": (1,), "num_stages": 2, "num_microbatches": 2, "recompute": "layer"}
    step = autopar.parallelize(two_products_a_layer, **options)
    (row,) = rows_of(step.verify([jnp.ones((16, 16))] * 4, jnp.ones((64, 16))), "arithmetic")
    assert row.planned == row.compiled > step.last_plan().flops
    assert "is done again" in row.note


def short_products(weights, x):
    """A loss in 16 bits under `jax.checkpoint`, so that its forward work is done again."""

    def loss(weights):
        h = x.astype(jnp.bfloat16)
        for gate, up in weights:
            h = h + jax.nn.silu(h @ gate.astype(h.dtype)) * (h @ up.astype(h.dtype))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(jax.checkpoint(loss))(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def short_arguments():
    keys = iter(jax.random.split(jax.random.key(0), 7))
    weights = [tuple(0.05 * jax.random.normal(next(keys), (64, 64)) for _ in range(2)) for _ in range(3)]
    return weights, jax.random.normal(next(keys), (32, 64))


@pytest.mark.parametrize("wishes", [{"constraints": autopar.zero3(), "num_microbatches": 4}, {}])
def test_what_xla_on_cpus_does_with_16_bits_is_explained_and_values_may_differ_by_their_rounding(wishes):
    """It gathers some of them in 32, does no barrier's work again, and keeps in 32 bits what another program rounds."""
    step = autopar.parallelize(short_products, devices=4, mesh_shape=(4,), **wishes)
    found = step.verify(*short_arguments(), values=True)
    assert found.ok, str(found)
    sent = {row.what.partition(" ")[0]: row for row in rows_of(found, "collectives")}
    if wishes:
        assert sent["all-gather"].verdict == "explained"
        assert sent["all-gather"].compiled == 2 * sent["all-gather"].planned
    else:
        (arithmetic,) = rows_of(found, "arithmetic")
        assert ("equal products" in arithmetic.note) is (arithmetic.compiled < arithmetic.planned)
    loss = rows_of(found, "values")[-1]
    assert 1e-5 < loss.planned < 0.02


def test_gathers_of_32_bits_that_were_planned_in_16_are_noticed(monkeypatch):
    """XLA was given them so: it is no choice of XLA's."""

    def wide(move, array, mesh):
        if move.kind == "all-gather" and array.dtype == jnp.bfloat16:
            return perform_move(move, array.astype(jnp.float32), mesh).astype(array.dtype)
        return perform_move(move, array, mesh)

    monkeypatch.setattr(per_device, "perform_move", wide)
    options = {"devices": 4, "mesh_shape": (4,), "constraints": autopar.zero3(), "num_microbatches": 4}
    found = autopar.parallelize(short_products, **options).verify(*short_arguments())
    (gathered,) = (row for row in rows_of(found, "collectives") if row.what.startswith("all-gather"))
    assert gathered.verdict == "differs"


# --- lowering broken on purpose ---------------------------------------------------------------------------------------


def test_a_collective_over_a_wrong_axis_is_noticed(monkeypatch):
    def wrong(move, array, mesh):
        if move.kind == "all-reduce" and move.axes == (0,):
            move = dataclasses.replace(move, axes=(1,))
        return perform_move(move, array, mesh)

    monkeypatch.setattr(per_device, "perform_move", wrong)
    step = parallel(mesh_shape={"data": 2, "model": 2}, constraints=autopar.data_parallel("data"))
    found = step.verify(*arguments(), values=True)
    assert not found.ok
    differing = {row.what: row for row in found.differing}
    over_data = [row for what, row in differing.items() if row.topic == "collectives" and what.endswith("over data")]
    assert over_data
    assert all(row.compiled < row.planned for row in over_data)
    assert [row for row in found.differing if row.topic == "values"]
    with pytest.raises(autopar.VerificationError, match=r"train_step is not what its plan says in .* all-reduce over"):
        found.check()
    assert str(found).splitlines()[0].startswith("NOT AS PLANNED")
    assert "differs" in str(found).splitlines()[3]


def test_an_additional_all_gather_is_noticed(monkeypatch):
    def more(move, array, mesh):
        array = perform_move(move, array, mesh)
        if move.kind == "all-gather" and array.ndim == 2:
            parts = jax.lax.all_gather(array, mesh.axis_names[0])
            array = array + 0 * parts.sum(0)
        return array

    monkeypatch.setattr(per_device, "perform_move", more)
    found = parallel(mesh_shape=(8,), constraints=autopar.zero3()).verify(*arguments())
    gathers = [row for row in found.differing if row.what == "all-gather over x"]
    assert len(gathers) == 1
    assert gathers[0].compiled > gathers[0].planned


def test_a_peak_that_is_counted_too_low_is_noticed(monkeypatch):
    counted = MemoryModel._peak

    def less(self, program, footprint, sizes):
        found = counted(self, program, footprint, sizes)
        temporaries = sum(tensor.bytes for tensor in found.tensors if not tensor.is_kept)
        return dataclasses.replace(found, bytes=found.bytes - temporaries // 2)

    monkeypatch.setattr(MemoryModel, "_peak", less)
    state, batch = arguments()
    many = jax.tree.map(lambda x: jnp.tile(x, (64, 1)), batch)
    found = parallel(mesh_shape=(2,), num_microbatches=1, recompute="none").verify(state, many)
    assert [(row.topic, row.what) for row in found.differing] == [("memory", "peak")]
    assert found.differing[0].planned < found.differing[0].compiled


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "matches"), ("float16", "explained")])
def test_sums_over_microbatches_lie_where_they_were(dtype, verdict):
    """Weights outweigh the examples here. XLA makes products of 16 bits from copies of all weights in 32."""

    def step(weights, xs):
        def loss_of(weights):
            x = xs.astype(dtype)
            for weight in weights:
                x = jnp.tanh(x @ weight.astype(dtype))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        return [p - 0.1 * g for p, g in zip(weights, gradients, strict=True)], loss

    shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4, jax.ShapeDtypeStruct((8, 256), jnp.float32)
    found = autopar.parallelize(step, devices=1, num_microbatches=4).verify(*shapes)
    (peak,) = [row for row in rows_of(found, "memory") if row.what == "peak"]
    assert peak.verdict == verdict
    if dtype == "float32":
        assert peak.planned == pytest.approx(peak.compiled, rel=0.01)


def test_work_that_every_device_does_is_noticed(monkeypatch):
    """The plan of one mesh with the program of another, where all devices do everything."""
    step = parallel(mesh_shape=(2,))
    compiled = step.compile(*arguments())
    whole = parallel(devices=jax.devices()[:1]).compile(*arguments())
    monkeypatch.setattr(compiled, "executable", whole.executable)
    (row,) = rows_of(step.verify(*arguments()), "arithmetic")
    assert (row.verdict, row.compiled) == ("differs", 2 * row.planned)


# --- what a verification is -------------------------------------------------------------------------------------------


def row(number=0, **fields):
    given = {
        "topic": "collectives",
        "what": f"all-gather over x{number}",
        "unit": "bytes",
        "planned": 1.0,
        "compiled": 2.0,
    }
    return VerifiedRow(**{**given, "verdict": "differs", **fields})


def verification(*rows):
    return Verification(
        step="train_step", fingerprint="f", platform="cpu", num_devices=8, jax_version="0", rows=tuple(rows)
    )


def test_a_verification_goes_to_json_and_back_and_keeps_its_schema():
    found = step_in("stages").verify(*arguments())
    assert Verification.from_json(found.to_json()) == found
    check_fields(json.loads(found.to_json()), VERIFICATION_SCHEMA, "a verification")
    with pytest.raises(autopar.PlanError, match="not a verification of version 1"):
        Verification.from_json(found.to_json().replace('"matches"', '"fits"'))


def test_it_prints_as_at_most_40_lines_with_what_differs_first():
    text = str(verification(*(row(n, verdict="matches", compiled=1.0) for n in range(50)), row(99)))
    lines = text.splitlines()
    assert len(lines) <= 40
    assert "over x99" in lines[3]
    assert lines[-1] == "... and 16 more rows, 0 of them different; verify --full lists all"
    assert "1 differs, 50 match" in lines[0]


def test_equal_stages_are_one_row():
    rows = [row(verdict="matches", compiled=1.0, stage=stage) for stage in (0, 1, 2, 5)]
    lines = str(verification(*rows)).splitlines()
    assert len(lines) == 5
    assert lines[-2].startswith("stages 0 to 2, 5")
    assert lines[-1].startswith("The 4 figures are 1 row: ")


def test_each_kind_of_row_is_shown_and_full_shows_each_figure():
    moved = [row(number, verdict="matches", compiled=1.0) for number in range(50)]
    values = [row(topic="values", what=f"loss {n}", unit="error", verdict="matches", note="float32") for n in range(3)]
    found = verification(*moved, *values)
    lines = str(found).splitlines()
    assert len(lines) <= 40
    assert sum("all 3 results of float32" in line for line in lines) == 1
    assert lines[0].endswith(": 53 match")
    assert lines[-1].startswith("The 53 figures are 51 rows: ")
    full = page(found, full=True)
    assert len(full.splitlines()) == 3 + 53 + 1, "and what the figures of values are"
    assert all(f"loss {number}" in full for number in range(3))


def test_values_say_what_their_figures_are_and_noise_has_a_row_of_its_own():
    alike = {"topic": "values", "unit": "error", "verdict": "matches"}
    near = [row(**alike, what=f"p/{n}", note="float32", planned=1e-5, compiled=n * 1e-6) for n in range(3)]
    lines = str(verification(*near)).splitlines()
    assert "all 3 results of float32" in lines[3]
    assert lines[3].endswith("matches  the nearest to its limit")
    assert lines[4] == "values: the largest difference of an entry, as a share of the result's largest entry"
    assert lines[5] == "the nearest to its limit: p/2 (of float32)"
    noise = row(**alike, what="p/bias", note="float32, by what the step makes of rounding", planned=12.0, compiled=1.4)
    text = str(verification(*near, noise))
    assert "3 results of float32" in text
    assert "all 3" not in text
    said = next(line for line in text.splitlines() if "1 result of float32" in line)
    assert said.endswith("<= 1.2e+01   1.4e+00  matches  noise")
    assert "so a match tells nothing of it" in text


def test_figures_that_read_the_same_are_given_to_the_byte():
    text = str(verification(row(planned=10_000_000.0, compiled=10_000_001.0)))
    assert "10,000,000" in text
    assert "10,000,001" in text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["zero3", "stages"])
def test_a_report_has_a_section_of_what_was_verified_if_it_is_given(mode, capsys):
    step = step_in(mode)
    found = step.verify(*arguments())
    plan = step.last_plan()
    plan.show()
    assert "Verified" not in capsys.readouterr().out
    plan.show(verified=found)
    printed = capsys.readouterr().out
    assert "Verified: train_step as compiled" in printed
    assert "products and convolutions" in printed
    assert "<h2>Verified</h2>" in plan.html(verified=found)
    broken = dataclasses.replace(found, rows=(row(),))
    assert "<h2>Not as planned</h2>" in plan.html(verified=broken)


def test_values_need_arrays():
    state, batch = shapes()
    assert step_in("zero3").verify(state, batch).ok
    with pytest.raises(autopar.ArgumentError, match="to compare values train_step needs arrays"):
        step_in("zero3").verify(state, batch, values=True)
