"""Benchmarks measure searches, so none of them may find its plan on disk."""

import re
from pathlib import Path

OF_THE_CACHE = "restart_time"
"""Has a cache of its own, empty at first."""
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_benchmark_that_plans_does_so_without_the_plan_cache():
    texts = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py")}
    turned_off = {
        name for name, text in texts.items() if re.search(r"""["']AUTOPAR_CACHE["']\]? *[=:] *["']off["']""", text)
    }
    plan = {name for name, text in texts.items() if re.search(r'parallelize\(|"autopar", "plan"|decide\(', text)}
    by_import = {name for name in plan if any(f"from {other} import" in texts[name] for other in turned_off)}
    assert plan - turned_off - by_import == {OF_THE_CACHE}
    assert len(plan) > 4
