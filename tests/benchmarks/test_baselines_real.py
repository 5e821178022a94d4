"""What `benchmarks/baselines_real.py` measures: every way in turn, ratios to our plan within a round."""

import json

import jax
import pytest

from autopar.models import build
from tests.benchmarks.scripts import SCRIPTS, load_script


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        patch.setenv("XLA_FLAGS", "")
        patch.setenv("AUTOPAR_CACHE", "off")
        yield load_script("baselines_real", patch)


def test_each_round_measures_every_way_once_after_a_step_of_its_own(script):
    order = []
    ways = [script.Way(name, "", lambda name=name: order.append(name)) for name in ("a", "b")]
    ways.append(script.Way("none", "cannot: no layers"))
    script.measure(ways, 2)
    assert order[::2] == order[1::2], "a step that is not measured comes before the one that is"
    assert [sorted(order[:4]), sorted(order[4:])] == [["a", "a", "b", "b"]] * 2
    assert [len(way.seconds) for way in ways] == [2, 2, 0]


def test_ratios_are_taken_within_rounds_and_a_faster_way_is_told(script, capsys):
    ours, other = script.Way(script.OURS, "mesh", seconds=[1.0, 4.0, 1.0]), script.Way("b", "", seconds=[2.0, 2.0, 2.0])
    rows = [script.row(ours, ours), script.row(other, ours), script.row(script.Way("c", "cannot: 3 layers"), ours)]
    assert rows[1]["ratio_in_rounds"] == rows[1]["median_over_ours"] == 2.0
    assert script.show("gpt", rows)
    assert "cannot: 3 layers" in capsys.readouterr().out
    assert not script.show("gpt", [script.row(script.Way("b", "", seconds=[0.9, 0.9, 0.9]), ours)])


@pytest.mark.slow
def test_a_small_model_runs_by_our_plan_and_by_plain_jit(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MODELS", {"small": ("mlp", {"layers": 1, "hidden": 16, "inputs": 16, "batch": 16})})
    asked = ["--only", "small", "--ways", "autopar", "jax.jit*", "--rounds", "3", "--plot"]
    asked += ["--results", str(tmp_path / "rows"), "--cluster", "cpu"]
    assert script.main(asked) in (0, 1)
    found = json.loads((tmp_path / "rows" / "small.json").read_text())
    assert [row["way"] for row in found["rows"]] == ["autopar", "jax.jit, Shardy", "jax.jit, GSPMD"]
    assert all(len(row["seconds"]) == 3 for row in found["rows"])
    assert (tmp_path / "baselines_real.svg").stat().st_size > 1000
    heading, _, *lines = (tmp_path / "baselines_real_table.md").read_text().splitlines()
    assert heading == "| way | small |"
    assert [line.split(" | ")[0] for line in lines] == ["| autopar", "| jax.jit, Shardy", "| jax.jit, GSPMD"]


def test_every_way_is_named_once(script):
    built = build("gpt", layers=2, hidden=32, heads=4, seq=16, batch=8, vocab=256)
    names = [name for name, _ in script.wishes(built)]
    assert len(names) == len(set(names))
    assert {"autopar", "ZeRO-3", "Megatron 2 x DP 4", "GPipe 2 x DP 4", "inter-operator only"} <= set(names)


def test_the_step_by_hand_computes_what_jit_does_of_models_whose_batch_has_equal_parts(script):
    built = build("gpt", layers=1, hidden=32, heads=4, seq=16, batch=16, vocab=256, dropout=0.0)
    assert script.has_equal_parts(built)
    assert not script.has_equal_parts(build("wide_resnet"))
    by_hand, jitted, batches = script.data_parallel_step(built), jax.jit(built.train_step), built.data(0)
    states = [built.create_state(jax.random.key(0)) for _ in range(2)]
    for batch, _ in zip(batches, range(3), strict=False):
        (states[0], own), (states[1], theirs) = by_hand(states[0], batch), jitted(states[1], batch)
        assert float(own["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-5)
    assert int(states[0].step) == 3
