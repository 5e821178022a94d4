"""Oracle 2: any assignment of strategies computes the same function.

Every program runs with a random legal strategy on every equation and is compared with plain `jax.jit` on one device. The fast
part runs every program on one mesh, which its name picks; the part marked `slow`, on all meshes with more seeds.
Sizes are multiples of 8 and of 3, so that every mesh finds something to split.
"""

import zlib

import jax
import pytest

from autopar.testing import run_with_random_strategies
from tests.intra_op.lowering.programs import PROGRAMS
from tests.oracles import assert_trees_close
from tests.zoo import ZOO

MESHES = ((2,), (4,), (2, 2), (2, 4), (2, 2, 2), (3,))


def assert_strategies_change_nothing(fun, args, mesh_shape, seed):
    expected = jax.jit(fun)(*args)
    actual = run_with_random_strategies(fun, *args, mesh_shape=mesh_shape, seed=seed)
    assert_trees_close(actual, expected, what=f"mesh {mesh_shape}, seed {seed}: ")


def fast_mesh(name):
    """A mesh for each program, such that all programs together use all of them about equally."""
    return MESHES[zlib.crc32(name.encode()) % len(MESHES)]


def show(mesh_shape):
    return "x".join(map(str, mesh_shape))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    [pytest.param(name, fast_mesh(name), id=f"{name}-{show(fast_mesh(name))}") for name in PROGRAMS],
)
def test_random_strategies_change_no_result(name, mesh_shape):
    fun, *args = PROGRAMS[name]
    assert_strategies_change_nothing(fun, args, mesh_shape, seed=len(mesh_shape))


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", MESHES, ids=show)
@pytest.mark.parametrize("name", PROGRAMS)
def test_random_strategies_change_no_result_on_any_mesh(name, mesh_shape):
    fun, *args = PROGRAMS[name]
    for seed in range(10, 14):
        assert_strategies_change_nothing(fun, args, mesh_shape, seed)


FAST_MESH = {"moe": (2, 2), "resnet_block": (3,)}
"""The other steps run in the slow part only: XLA takes a minute to compile one."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "mesh_shape"), FAST_MESH.items())
def test_random_strategies_change_no_train_step(name, mesh_shape):
    step, state, batch = ZOO[name]()
    assert_strategies_change_nothing(step, (state, batch), mesh_shape, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", MESHES, ids=show)
@pytest.mark.parametrize("name", ZOO)
def test_random_strategies_change_no_train_step_on_any_mesh(name, mesh_shape):
    step, state, batch = ZOO[name]()
    for seed in range(20, 22):
        assert_strategies_change_nothing(step, (state, batch), mesh_shape, seed)
