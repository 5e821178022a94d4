"""NVIDIA's table of context-parallel training in fp8, which nothing was fitted on, against the closed form."""

import statistics
from collections.abc import Iterator
from types import ModuleType

import pytest

from autopar.simulate.closed_forms.training_job import problems
from tests.benchmarks.scripts import load_script


@pytest.fixture(scope="module")
def long_sequences() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield load_script("long_sequences", patch)


def test_published_runs_of_divided_sequences_are_predicted(long_sequences):
    """From 4 devices with 4 Ki tokens to 1024 with 1 Mi: within 8 %, 4 % in the mean."""
    found = list(long_sequences.predictions())
    assert [row.job.devices for row, _, _ in found] == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert all(not list(problems(row.job)) for row, _, _ in found)
    errors = [abs(error) for _, _, error in found]
    assert max(errors) < 0.08
    assert statistics.fmean(errors) < 0.04
    assert all(one.step.fits for _, one, _ in found)


def test_without_division_the_longer_sequences_would_not_fit(long_sequences):
    rows = {row.kibi_tokens: row for row in long_sequences.ROWS}
    assert [rows[n].cp for n in (16, 32, 1024)] == [1, 2, 32]
    longest = long_sequences.dataclasses.replace(rows[1024], cp=1)
    assert not long_sequences.predict(long_sequences.preset("dgx-h100"), longest.job).step.fits
