"""Train steps of other packages' models give what `jax.jit` gives, in every mode; where one cannot run, the error says why.

A package that is not installed skips its steps; `make test-libraries` installs all. Two steps are made, and all that they return
is compared.
"""

import functools
import warnings

import jax
import pytest

import autopar
from tests.libraries import (  # noqa: F401 - they fill the corpus
    equinox_and_haiku_steps,
    flax_steps,
    geometry_steps,
    optimizer_steps,
    probability_steps,
    transformers_steps,
)
from tests.libraries.corpus import CORPUS
from tests.libraries.modes import MODES
from tests.oracles import assert_trees_close

LEAST_SCALE = 1e-2
"""Of a leaf: a bias in front of a norm has a gradient that is zero up to rounding."""


@functools.cache
def example(name):
    """(step, state, batch, what `jax.jit` returns for the first and the second step)."""
    step, state, batch = CORPUS[name].build()
    run = jax.jit(step)
    first = run(state, batch)
    return step, state, batch, (first, run(first[0], batch))


def same_as_jit(name, mode):
    """Run two steps and compare; the parallel step."""
    step, state, batch, expected = example(name)
    parallel = autopar.parallelize(step, **MODES[mode])
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), state)
    for number, wanted in enumerate(expected, 1):
        made = parallel(state, batch)
        how = {"rtol_of_scale": CORPUS[name].rtol_of_scale, "least_scale": LEAST_SCALE}
        assert_trees_close(parallel.gather(made), wanted, what=f"step {number}: ", **how)
        state = made[0]
    return parallel


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CORPUS)
def test_a_step_of_a_library_equals_jit_or_is_refused_with_a_reason(name, mode):
    entry = CORPUS[name]
    for package in entry.packages:
        pytest.importorskip(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if mode in entry.refused:
            with pytest.raises(autopar.AutoparError, match=entry.refused[mode]):
                same_as_jit(name, mode)
        else:
            same_as_jit(name, mode)
    told = {str(warning.message) for warning in caught if issubclass(warning.category, autopar.AutoparWarning)}
    unexpected = [text for text in told if not any(part in text for part in entry.told_in(mode))]
    assert not unexpected


def test_the_corpus_has_forty_steps_and_names_its_modes():
    assert len(CORPUS) >= 40
    assert {mode for entry in CORPUS.values() for mode in entry.refused} <= set(MODES)
