"""A plan whose microbatches take factors for finite says so, in its report and in its file, and is kept and restored so."""

import json

import pytest

import autopar
from autopar import decide, explain
from tests.microbatches.gated_steps import (
    LOSSES,
    ONE_MESH,
    STAGES,
    arguments,
    behind_a_branch,
    descent,
    gated,
    layered,
    planned,
)
from tests.oracles import assert_same_as_jit


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_the_report_names_the_products_and_says_what_may_happen(way):
    plan = planned("a rolled weight", **way)
    (product,) = plan.assumed_finite
    assert product.startswith("mul at ")
    assert "gated_steps.py" in product
    said = " ".join(explain.explain(plan).split())
    assert product in said
    assert "NaN in place of an infinity" in said
    strict = autopar.parallelize(descent(layered(gated)), **way).plan(*arguments())
    assert "NaN in place of an infinity" not in explain.explain(strict)


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_a_plan_that_is_read_back_runs_in_the_same_way(way):
    plan = planned("a branch", **way)
    read = autopar.plan_from_json(plan.to_json())
    assert read == plan
    step = descent(behind_a_branch)
    parallel = autopar.parallelize(step, plan=read)
    assert_same_as_jit(step, parallel, *arguments(), steps=2)
    assert parallel.last_plan().assumed_finite == plan.assumed_finite != ()


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_a_plan_that_was_written_before_is_read(way):
    fields = json.loads(planned("a branch", **way).to_json())
    assert fields.pop("assumed_finite")
    assert autopar.plan_from_json(json.dumps(fields)).assumed_finite == ()


@pytest.mark.parametrize("way", [ONE_MESH, STAGES], ids=["microbatches", "stages"])
def test_a_plan_of_the_cache_runs_in_the_same_way(way, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    plan = planned("a rolled weight", **way)
    monkeypatch.setattr(decide, "_search", None)
    step = descent(LOSSES["a rolled weight"])
    again = autopar.parallelize(step, **way)
    assert again.plan(*arguments()).assumed_finite == plan.assumed_finite != ()
    assert_same_as_jit(step, again, *arguments(), steps=2)
