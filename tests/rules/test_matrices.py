"""Kernels for batches of matrices wait for no other thread: on CPUs every large batch is worked through one by one.

JAX's kernels for CPUs hand parts of a batch to the threads that the devices run on. `qr` of two matrices of complex numbers, with
its gradient on eight devices, waits for ever then; `tests/harnesses/` has it.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.intra_op.lowering.per_device import map_over_mesh
from autopar.testing import random_assignment
from tests.layouts.values import device_mesh

KERNELS = {
    "cholesky": jnp.linalg.cholesky,
    "lu": lambda a: jax.lax.linalg.lu(a)[0],
    "triangular_solve": lambda a: jax.lax.linalg.triangular_solve(a, a, left_side=True),
    "eigh": jnp.linalg.eigvalsh,
    "qr": lambda a: jnp.linalg.qr(a)[1],
}


def ranks_of_kernels(fun, matrices):
    """The ranks of what LAPACK's kernels take in the lowered program."""
    assignment, _, _ = random_assignment(fun, matrices, mesh_shape=(2,), seed=0)
    text = jax.jit(map_over_mesh(assignment, device_mesh((2,)))).lower(matrices).as_text()
    calls = re.findall(r"custom_call @lapack_\w+\(.*: \(tensor<([\dx]+)x\w", text)
    assert calls
    return {call.count("x") + 1 for call in calls}


@pytest.mark.parametrize("name", KERNELS)
def test_a_large_batch_is_worked_through_matrix_by_matrix(name):
    matrices = np.eye(40, dtype=np.float32) + np.zeros((16, 1, 1), np.float32)
    assert ranks_of_kernels(KERNELS[name], matrices) == {2}


def test_a_small_batch_is_one_call():
    assert ranks_of_kernels(KERNELS["lu"], np.eye(3, dtype=np.float32) + np.zeros((8, 1, 1), np.float32)) == {3}
