"""The work of contractions, against XLA's own count before it optimizes; an element each for everything else."""

import jax
import pytest

from autopar.rules.table import flops_of, rule_for
from tests.rules.examples import EXAMPLES, convolution, floats

IMAGES = (16, 8, 8, 8)
CONTRACTIONS = {
    **{f"product {i}": ("dot_general", example) for i, example in enumerate(EXAMPLES["dot_general"])},
    **{
        text: ("conv_general_dilated", convolution(IMAGES, kernel, **{"padding": "VALID"} | params))
        for text, kernel, params in (
            ("windows", (3, 3, 8, 16), {}),
            ("strides", (3, 3, 8, 16), {"window_strides": (2, 2)}),
            ("rows apart", (2, 2, 8, 16), {"lhs_dilation": (2, 2), "padding": ((0, 0), (0, 0))}),
            ("points", (1, 1, 8, 16), {}),
            ("whole images", (8, 8, 8, 4), {}),
            ("groups of features", (3, 3, 2, 16), {"feature_group_count": 4}),
            ("groups of examples", (3, 3, 8, 16), {"batch_group_count": 4}),
            ("groups of examples at points", (1, 1, 8, 16), {"batch_group_count": 4}),
        )
    },
}


@pytest.mark.parametrize("text", CONTRACTIONS)
def test_a_contraction_counts_the_operations_that_xla_counts(text):
    name, example = CONTRACTIONS[text]
    eqn = example.equation(name)
    assert flops_of(eqn, rule_for(eqn)) == jax.jit(example.fun).lower(*example.args).cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("name", "count"), [("exp", 8 * 12), ("reduce_sum", 4 * 8 * 12), ("broadcast_in_dim", 4 * 8 * 12)]
)
def test_other_operations_count_one_operation_per_element_of_the_largest_value(name, count):
    eqn = EXAMPLES[name][0].equation(name)
    assert flops_of(eqn, rule_for(eqn)) == count


def test_an_operation_without_operands_counts_its_result():
    eqn = EXAMPLES["iota"][0].equation("iota")
    assert flops_of(eqn, rule_for(eqn)) == floats(8, 12).size
