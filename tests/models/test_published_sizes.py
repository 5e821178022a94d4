"""Published sizes: each builds, has about the parameters that its name says, and has a source."""

import re

import jax
import numpy as np
import pytest

from autopar.models import MODELS, build
from autopar.models.published_sizes import find_size, published_sizes

ALL = [(model, name) for model in MODELS for name in published_sizes(model)]
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def parameters(model, name):
    """How many a model of that size has; of equal layers two are built."""
    sizes = dict(find_size(model, name))
    if model == "wide_resnet":
        return count(build(model, **sizes))
    layers = sizes.pop("layers")
    two, four = (count(build(model, **sizes, layers=few)) for few in (2, 4))
    return two + (four - two) * (layers - 2) / 2


def count(built):
    state = jax.eval_shape(built.create_state, jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state.params))


def is_at_an_end(model, name):
    """Whether it is the first or the last of the model's sizes."""
    names = list(published_sizes(model))
    return name in (names[0], names[-1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "name"),
    [pytest.param(*one, marks=[] if is_at_an_end(*one) else pytest.mark.slow) for one in ALL if one[0] != "gpt_scan"],
)
def test_a_size_has_the_parameters_of_its_name(model, name):
    number, unit = re.fullmatch(r"([\d.]+)([MBT])", name).groups()
    assert parameters(model, name) == pytest.approx(float(number) * UNITS[unit], rel=0.09)


def test_each_has_a_source_and_fields_that_the_model_has():
    for model, name in ALL:
        found = published_sizes(model)[name]
        assert re.search(r"arXiv:\d{4}\.\d{5}", found.source)
        assert found.sizes.keys() <= {*MODELS[model].config.__dataclass_fields__}


def test_names_are_found_in_either_case_and_unknown_ones_list_the_known():
    assert find_size("gpt", "39b") == find_size("gpt_scan", "39B")
    with pytest.raises(ValueError, match=r"no size '40B' of gpt: the published ones are 125M, 350M, .*, 1T"):
        find_size("gpt", "40B")
    assert published_sizes("mlp") == {}
