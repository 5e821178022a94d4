"""Without arguments, what is listed is what was planned or used last."""

import pytest

import autopar
from autopar.errors import ArgumentError
from tests.why.test_leaf import MODES, SETTINGS, shapes, train_step


def test_modules_and_programs_are_those_of_the_arguments_that_were_planned():
    step = autopar.parallelize(train_step, **SETTINGS, **MODES["one mesh"])
    for listed in (step.hlo, step.program):
        with pytest.raises(
            ArgumentError, match=r"train_step has not been planned yet: pass its arguments, or call train_step\.plan"
        ):
            listed()
    step.plan(*shapes(1))
    assert step.program() == step.program(*shapes(1))
    assert str(step.hlo()) == str(step.hlo(*shapes(1)))
