"""The factor notation: what is read is what is printed, and a rule that does not describe its shapes is refused by words."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.layouts.monoids import MONOIDS
from autopar.rules.factor_rule import FactorRule, make_rule
from autopar.rules.notation import CLAUSES, parse

DENSE = "b s c, c e -> b s e | sum: c | linear: 0; 1"
DENSE_SHAPES = ([(2, 3, 4), (4, 5)], [(2, 3, 5)])


def test_a_rule_is_read_into_operands_sizes_and_clauses():
    rule = parse(DENSE, *DENSE_SHAPES)
    assert rule == FactorRule(
        inputs=((("b",), ("s",), ("c",)), (("c",), ("e",))),
        outputs=((("b",), ("s",), ("e",)),),
        sizes=(("b", 2), ("s", 3), ("c", 4), ("e", 5)),
        reduced=(("c", "sum"),),
        linear=((0,), (1,)),
    )
    assert rule.shardable() == ("b", "s", "c", "e")


@pytest.mark.parametrize(
    ("text", "in_shapes", "out_shapes"),
    [
        (DENSE, *DENSE_SHAPES),
        ("(h d) -> h d | linear: 0 | any", [(12,)], [(3, 4)]),
        ("., a 1 -> a", [(), (4, 1)], [(4,)]),
        ("a b, c 1, c b -> a b | sum: c | seed: 0 | linear: 0 2", [(4, 2), (3, 1), (3, 2)], [(4, 2)]),
        ("a b -> a | max: b", [(2, 3)], [(2,)]),
        ("a b, b -> a, b | or: b | and: a | whole: b", [(2, 3), (3,)], [(2,), (3,)]),
        (" -> a b", [], [(4, 5)]),
        ("a b, a c -> a d | whole: b c d | linear: 0 1 | any", [(2, 3), (2, 4)], [(2, 7)]),
    ],
)
def test_a_rule_is_printed_as_it_was_read(text, in_shapes, out_shapes):
    rule = parse(text, in_shapes, out_shapes)
    assert " ".join(str(rule).split()) == " ".join(text.split())
    assert parse(str(rule), in_shapes, out_shapes) == rule


@st.composite
def rules(draw):
    """Rules over a few factors, with the shapes they describe; factors appear alone somewhere, so sizes follow.

    A factor that indexes an operand twice is whole, and one is reduced only if some output lacks it.
    """
    names = "abcdef"[: draw(st.integers(1, 6))]
    sizes = {name: draw(st.integers(2, 5)) for name in names}
    alone = tuple((name,) for name in names)
    dims = st.lists(
        st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True).map(tuple), max_size=3, unique=True
    )
    inputs = [alone, *draw(st.lists(dims.map(tuple), max_size=2))]
    outputs = draw(st.lists(dims.map(tuple), min_size=1, max_size=2))
    reduced = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(MONOIDS), max_size=2))
    reduced = {f: m for f, m in reduced.items() if not all(any(f in dim for dim in out) for out in outputs)}
    repeated = {f for operand in (*inputs, *outputs) for f in names if sum(dim.count(f) for dim in operand) > 1}
    whole = sorted({*draw(st.lists(st.sampled_from(names), max_size=2)), *repeated})
    numbers = st.integers(0, len(inputs) - 1)
    linear = draw(st.lists(st.lists(numbers, min_size=1, max_size=2, unique=True), max_size=2))
    seeds = draw(st.lists(numbers, max_size=1))
    rule = make_rule(
        inputs, outputs, sizes, reduced=reduced, whole=whole, seeds=seeds, linear=linear, any_monoid=draw(st.booleans())
    )
    shapes = [
        [tuple(math.prod(sizes[f] for f in dim) for dim in operand) for operand in side] for side in (inputs, outputs)
    ]
    return rule, shapes


@given(rules())
def test_every_rule_survives_printing_and_reading(case):
    rule, shapes = case
    again = parse(str(rule), *shapes)
    assert str(again) == str(rule)
    assert (again.inputs, again.outputs, again.whole, again.seeds) == (
        rule.inputs,
        rule.outputs,
        rule.whole,
        rule.seeds,
    )
    assert dict(again.sizes) == dict(rule.sizes)
    assert dict(again.reduced) == dict(rule.reduced)
    assert (again.linear, again.any_monoid) == (rule.linear, rule.any_monoid if rule.linear else again.any_monoid)


WORDS = [*"abc", "1", ".", ",", "(", ")", "->", "|", ":", ";", "0", "7", "x y", "-1", *(f"{key}:" for key in CLAUSES)]


@st.composite
def nearly_rules(draw):
    """A rule's text with a few words put in, taken out or exchanged, and the shapes of the rule."""
    rule, shapes = draw(rules())
    words = str(rule).replace("(", "( ").replace(")", " )").replace(",", " ,").split()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(words)))
        words[at : at + draw(st.integers(0, 1))] = draw(st.lists(st.sampled_from(WORDS), max_size=1))
    return " ".join(words), shapes


SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=3)
ANY_TEXT = st.tuples(st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map(" ".join)), st.tuples(SHAPES, SHAPES))


@settings(max_examples=300)
@given(st.one_of(nearly_rules(), ANY_TEXT))
def test_text_is_a_rule_that_prints_as_an_equal_one_or_it_is_refused_and_quoted(case):
    assert_rule_or_refused(*case)


@pytest.mark.slow
@settings(max_examples=3000)
@given(st.one_of(nearly_rules(), ANY_TEXT))
def test_much_text_is_a_rule_or_refused(case):
    assert_rule_or_refused(*case)


def assert_rule_or_refused(text, shapes):
    rule = error = None
    try:
        rule = parse(text, *shapes)
    except RuleError as refusal:
        error = str(refusal)
    if rule is None:
        assert text in error or "says" in error
    else:
        assert parse(str(rule), *shapes) == rule
        for key in CLAUSES:
            assert (f"| {key}" in str(rule)) == (f"|{key}" in text.replace(" ", ""))


@given(rules())
def test_shardable_factors_are_not_whole_and_are_in_every_output_or_reduced(case):
    rule, _ = case
    for name, _ in rule.sizes:
        everywhere = all(any(name in dim for dim in out) for out in rule.outputs)
        expected = name not in rule.whole and (name in dict(rule.reduced) or everywhere)
        assert (name in rule.shardable()) == expected


def test_make_rule_drops_factors_of_size_one_and_renames_in_order():
    rule = make_rule(
        [(("n7",), ("n3",), ("n9",))], [(("n9",), ("n7",))], {"n7": 4, "n3": 1, "n9": 2}, whole=["n3", "n9"]
    )
    assert str(rule) == "a 1 b -> b a | whole: b"
    assert rule.size_of("b") == 2


def test_the_size_of_a_factor_follows_from_the_others_in_its_dimension():
    assert dict(parse("(h d), h -> d", [(12,), (3,)], [(4,)]).sizes) == {"h": 3, "d": 4}


@pytest.mark.parametrize(
    ("text", "in_shapes", "out_shapes", "words"),
    [
        ("a b", [(2, 3)], [], "exactly one '->'"),
        ("a -> a -> a", [(2,)], [(2,)], "exactly one '->'"),
        ("a -> a | mean: a", [(2,)], [(2,)], "no clause 'mean'; there are sum, max"),
        ("a -> a | sum: z", [(2,)], [(2,)], "factor 'z' indexes no dimension"),
        ("a, b -> a", [(2,)], [(2,)], "names 2 inputs, the operation has 1$"),
        ("a b -> a", [(2, 3, 4)], [(2,)], r"input 0 has 2 dimensions, its shape is \(2, 3, 4\)"),
        ("a b -> a b", [(2, 3)], [(2, 3, 4)], r"output 0 has 2 dimensions, its shape is \(2, 3, 4\)"),
        ("a -> a, b", [(2,)], [(2,)], "names 2 outputs, the operation has 1$"),
        ("b,r,n -> b,r,n", [(2, 3, 4)], [(2, 3, 4)], "names 3 inputs, .* has 1: commas .* 'b r n' meant"),
        ("a b -> a, b", [(2, 3)], [(2, 3)], "names 2 outputs, .* is 'a b' meant"),
        ("(a b) -> (a b)", [(12,)], [(12,)], "the sizes of a, b do not follow from the shapes"),
        ("a, a -> a", [(2,), (3,)], [(2,)], r"says input 1 has shape \(2,\), the operation has \(3,\)"),
        ("a -> a", [(2,)], [(3,)], r"says output 0 has shape \(2,\), the operation has \(3,\)"),
        ("a -> a | seed: x", [(2,)], [(2,)], "'a -> a | seed: x': clause 'seed' lists numbers of inputs, 'x' is none"),
        ("a -> a | linear: -1", [(2,)], [(2,)], "'linear' lists numbers of inputs, '-1' is none"),
        ("a -> a | linear: 7", [(2,)], [(2,)], "'linear' names input 7, the inputs are numbered 0 to 0"),
        ("a -> a | seed: 1", [(2,)], [(2,)], "'seed' names input 1, the inputs are numbered 0 to 0"),
        ("a -> a | linear: 0;", [(2,)], [(2,)], "'linear' has a group without inputs"),
        ("a -> a | linear: 0 0", [(2,)], [(2,)], "'linear' lists an input twice"),
        ("a -> a | sum: a", [(2,)], [(2,)], "factor 'a' is not reduced by sum, for every output has it"),
        ("a b -> . | sum: a | sum: b", [(2, 3)], [()], "two clauses 'sum'; write one that lists everything"),
        ("a -> . | sum: a | max: a", [(2,)], [()], "factor 'a' is reduced by sum and by max"),
        ("a -> . | sum: a a", [(2,)], [()], "clause 'sum' lists factor 'a' twice"),
        ("a -> . | sum:", [(2,)], [()], "clause 'sum' needs a value"),
        ("a -> a | any: 0", [(2,)], [(2,)], "clause 'any' takes no value"),
        ("a, -> a", [(2,), ()], [(2,)], "an operand without a word; a scalar is written '.'"),
        ("(a -> a", [(2,)], [(2,)], r"'\(' names no factor; a dimension is a name, 1, or names in parentheses"),
        ("() -> a", [(1,)], [(1,)], r"'\(\)' names no factor; a dimension of size one is written 1"),
        ("2 -> a", [(2,)], [(2,)], "'2' names no factor"),
        ("a a -> a", [(2, 2)], [(2,)], "factor 'a' indexes one operand twice, where no shard is a block; add whole: a"),
    ],
)
def test_a_wrong_rule_is_refused_with_operand_and_shape(text, in_shapes, out_shapes, words):
    with pytest.raises(RuleError, match=words):
        parse(text, in_shapes, out_shapes)


def test_a_rule_checked_against_another_operation_names_the_count():
    with pytest.raises(RuleError, match="has 2 inputs, the operation has 1"):
        parse(DENSE, *DENSE_SHAPES).check([(2, 3, 4)], [(2, 3, 5)])
