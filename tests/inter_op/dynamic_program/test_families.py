"""What a family of choices knows of its stages before any are chosen."""

import dataclasses

import numpy as np
import pytest

from autopar.inter_op.dynamic_program.families import families_of
from autopar.inter_op.dynamic_program.problem import CostTable, Manual
from autopar.inter_op.dynamic_program.submeshes import submeshes
from tests.inter_op.dynamic_program.test_choose_stages import problem_of, table_of
from tests.schedules.chains import TRAINING_IN_CHUNKS


@pytest.mark.parametrize(("schedule", "virtual_stages"), TRAINING_IN_CHUNKS)
def test_of_options_that_are_alike_each_place_has_the_fastest_that_fits_there(schedule, virtual_stages):
    """With and without recomputation: a slower one fits with more microbatches in flight, often with one more alone.

    An option that is between two earlier ones in its seconds and in how often it fits counts too.
    """
    for seed in range(4):
        rng, options = np.random.default_rng(seed), submeshes(1, 4)
        one = table_of(rng, 6, len(options))
        order = (0, 1, 2) if seed % 2 else (0, 2, 1)
        leaner = [
            dataclasses.replace(
                one, seconds=one.seconds * (1 + 0.3 * n), activation_bytes=one.activation_bytes * (1 - 0.3 * n)
            )
            for n in order
        ]
        names = [field.name for field in dataclasses.fields(CostTable)]
        costs = CostTable(**{name: np.concatenate([getattr(each, name) for each in leaner]) for name in names})
        problem = problem_of(costs, options * 3, (1, 4), 8, schedule, virtual_stages, 9.0)
        for family in families_of(problem, Manual()):
            for kept in family.in_flight.values():
                fits = np.stack([family.open_places(z)[..., : len(kept)] for z in range(len(problem.options))])
                fits &= np.stack([family.bytes(z, kept) <= 9.0 for z in range(len(problem.options))])
                expected = np.where(fits, costs.seconds[..., None], np.inf).reshape(3, len(options), *fits.shape[1:])
                assert len(family.alike) == len(options)
                assert np.array_equal(family.least_s(kept), expected.min(axis=0))
