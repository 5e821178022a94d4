"""Train steps of other packages' models give what `jax.jit` gives, in every mode; where one cannot run, the error says why.

A package that is not installed skips its steps; `make test-libraries` installs all. Two steps are made, and all that they return
is compared.
"""

import functools
import importlib.util
import warnings

import jax
import jax.numpy as jnp
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
from tests.libraries.rounding import spread_of_rounding, two_steps
from tests.oracles import assert_trees_close

ANOTHER_ORDER = 2e-6
"""Of a leaf's largest entry: a sum of some hundred terms in another order, where the step makes no more of it."""

SPREADS = 8
"""How many times as far as the rounding of its inputs moves it a result may be from that of `jax.jit`."""

MOST_ALLOWED = 1e-3
"""Of a leaf's largest entry, or of 0.1 where that is smaller: a step that makes more of rounding would hide a wrong number."""


@functools.cache
def example(name):
    """(step, state, batch, what `jax.jit` returns for two steps, the absolute errors by leaf that each step may have)."""
    step, state, batch = CORPUS[name].build()
    run = jax.jit(step)
    expected = two_steps(run, state, batch)
    spread = spread_of_rounding(run, state, batch, expected)
    allowed = [{leaf: SPREADS * moved for leaf, moved in found.items()} for found in spread]
    for wanted, errors in zip(expected, allowed, strict=True):
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(wanted)}
        excused = {leaf: float(error / jnp.maximum(0.1, jnp.abs(leaves[leaf]).max())) for leaf, error in errors.items()}
        assert max(excused.values(), default=0.0) < MOST_ALLOWED, excused
    return step, state, batch, expected, allowed


def same_as_jit(name, mode):
    """Run two steps and compare."""
    step, state, batch, expected, allowed = example(name)
    parallel = autopar.parallelize(step, **MODES[mode])
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), state)
    for number, (wanted, rounding) in enumerate(zip(expected, allowed, strict=True), 1):
        made = parallel(state, batch)
        how = {"rtol_of_scale": ANOTHER_ORDER, "rounding": rounding}
        assert_trees_close(parallel.gather(made), wanted, what=f"step {number}: ", **how)
        state = made[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CORPUS)
def test_a_step_of_a_library_equals_jit_or_is_refused_with_a_reason(name, mode):
    entry = CORPUS[name]
    missing = [package for package in entry.packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
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
