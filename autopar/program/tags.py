"""Tags: what an operation stands for, carried through a trace from `Program` to jaxpr and back.

A pass that traces a rewritten step calls a part of it through `tag_operations`. The call is one equation of the jaxpr, whose
parameter is the tag itself; `program_of` inlines it, and every operation that comes from it carries `Equation.tag`. Operations
of programs nested in it, such as the body of a scan, carry none. What can go wrong: a function that uses a traced value which it
is not given; it cannot be traced on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive

from autopar.compat import constants_of
from autopar.program.program import Tag

Results = TypeVar("Results")

tagged_call_p = Primitive("tagged_call")
"""A call of a traced function. It is only ever inlined by `program_of`, so that it needs no more rules than this one."""
tagged_call_p.multiple_results = True
tagged_call_p.def_abstract_eval(lambda *_, jaxpr, tag: jaxpr.out_avals)


def tag_operations(fun: Callable[..., Results], tag: Tag) -> Callable[..., Results]:
    """The function `fun`, whose operations `program_of` is to give this tag.

    Arguments and results are trees of arrays. All traced values that `fun` uses must be among its arguments. Arguments that are
    not traced stay constants, which JAX folds as it does without a tag.
    """

    def call(*args: Any) -> Results:
        leaves, tree = jax.tree.flatten(args)
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]

        def traced(*operands: Any) -> Results:
            given = dict(zip(places, operands, strict=True))
            return fun(*jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)]))

        operands = [leaves[i] for i in places]
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*operands)
        captured = [x for x in constants_of(closed) if isinstance(x, jax.core.Tracer)]
        assert not captured, f"the operations of {tag} use values that they are not given: {captured}"
        outs = tagged_call_p.bind(*operands, jaxpr=closed, tag=tag)
        results: Results = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        return results

    return call
