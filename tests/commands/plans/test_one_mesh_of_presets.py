"""A preset that divides the batch over all devices has them on one mesh, unless stages are asked for."""

import argparse

import pytest

from autopar.commands.plans import parallel

OPEN = {"stages": None, "mesh": None, "schedule": "auto", "data_parallel": False, "zero": None}


@pytest.mark.parametrize(
    ("asked", "stages"),
    [
        ({}, "auto"),
        ({"data_parallel": True}, 1),
        ({"zero": 3}, 1),
        ({"zero": 3, "stages": 2}, 2),
        ({"zero": 1, "schedule": "1f1b"}, "auto"),
        ({"data_parallel": True, "mesh": [(2,), (2,)]}, "auto"),
    ],
)
def test_the_number_of_stages_is_open_where_the_flags_leave_it(asked, stages):
    options = argparse.Namespace(**OPEN | asked)
    assert (options.stages or parallel._open_stages(options)) == stages
