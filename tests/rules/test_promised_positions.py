"""What a user promises of positions, that they are sorted and differ, holds for no shard, which replaces those of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.rules import indexing

ROWS, SHARD = 8, 4


class Call:
    """A lookup or an update of rows, on the second of two shards."""

    def __init__(self, function, *arguments):
        (self.eqn,) = (e for e in jax.make_jaxpr(function)(*arguments).jaxpr.eqns if e.primitive.name in PRIMITIVES)
        self.params, self.bound = self.eqn.params, {}
        rows, *others = (("rows",), ("columns",)), (), ()
        self.rule = type("Rule", (), {"inputs": (rows, *others), "outputs": (rows,)})
        self.operands = [jnp.zeros((SHARD, 2)), jnp.asarray([[1], [5], [6]]), jnp.ones((3, 2))][: len(self.eqn.invars)]

    def is_sharded(self, dim):
        return dim == ("rows",)

    def local_size(self, dim):
        return SHARD

    def offset(self, dim):
        return SHARD

    def shard_index(self, factor):
        return 1

    def bind(self, *operands, **changed):
        self.bound = {**self.params, **changed, "positions": np.asarray(operands[1])[:, 0]}
        return (self.eqn.primitive.bind(*operands, **{**self.params, **changed}),)


PRIMITIVES = ("gather", "scatter-add")
PROMISES = {"indices_are_sorted": True, "unique_indices": True}
TABLE, PLACES = jnp.zeros((ROWS, 2)), jnp.asarray([1, 5, 6])


@pytest.mark.parametrize(
    ("local", "function"),
    [
        (indexing.gather_local, lambda table, places: table.at[places].get(mode="fill", **PROMISES)),
        (indexing.scatter_local, lambda table, places: table.at[places].add(jnp.ones((3, 2)), mode="drop", **PROMISES)),
    ],
    ids=PRIMITIVES,
)
def test_positions_are_in_any_order_on_a_shard(local, function):
    call = Call(function, TABLE, PLACES)
    assert call.params["indices_are_sorted"], "the case is one"
    local(call)
    assert call.bound["positions"][0] in (0, SHARD), "that of the other shard is replaced, and may come twice"
    assert not call.bound["indices_are_sorted"]
    assert not call.bound["unique_indices"]
