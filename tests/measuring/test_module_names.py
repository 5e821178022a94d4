"""Recorded operations are named by modules as plans name them."""

import pytest

from autopar.measuring.operations import RanOfProgram, told_of
from autopar.recording.recorded import ProgramOperation


@pytest.mark.parametrize(
    ("scopes", "named"),
    [
        (["GPT/block_0/up", "GPT/head", "GPT", ""], ["block_0/up", "head", "", ""]),
        (["block_0/up", "head", ""], ["block_0/up", "head", ""]),
        (["head/up", "", "head/up"], ["head/up", "", "head/up"]),
    ],
)
def test_the_name_of_the_model_is_left_out_where_all_modules_are_in_it(scopes, named):
    operations = [ProgramOperation(name=f"dot.{n}", opcode="dot", scope=scope) for n, scope in enumerate(scopes)]
    halves = [{("", one.name): one for one in half} for half in (operations[:1], operations[1:])]
    told = told_of([RanOfProgram(program=half, operations=[], strange=[]) for half in halves])
    assert [one.scope for one in told.program.values()] == named
