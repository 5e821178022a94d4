"""What a user is told of operations that run, but not as well as they could.

In: the operations of a step. Out: at most one warning of each kind, which names the operations and the user's lines. What can go
wrong: an operation inside a library, whose line the user cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.compat import JaxprEqn, is_device_memory, source_line
from autopar.errors import warn
from autopar.rules.table import has_rule
from autopar.rules.unlisted.guess import guess_rule

CALLBACKS = ("call_python", "pure_callback")


def warn_of_operations(eqns: Sequence[JaxprEqn]) -> None:
    """Warn of operations without a rule, of callbacks, and of memory that no plan takes over."""
    _warn_of_missing_rules(eqns)
    _warn_of_callbacks(eqns)
    _warn_of_memory_kinds(eqns)


def _warn_of_missing_rules(eqns: Sequence[JaxprEqn]) -> None:
    missing = [eqn for eqn in eqns if not has_rule(eqn) and eqn.primitive.name not in CALLBACKS]
    if missing:
        first = min(missing, key=lambda eqn: eqn.primitive.name)
        warn(
            f"no factor rule for {_list_first(missing, lambda eqn: True)}. These operations run whole on every device, which is "
            "correct but not parallel. autopar.register_rule(primitive, notation) adds a rule, e.g. "
            f'autopar.register_rule("{first.primitive.name}", "{guess_rule(first)}"). That is a guess, by which equal sizes are '
            "one factor: autopar.testing.run_with_random_strategies says whether it holds."
        )


def _warn_of_callbacks(eqns: Sequence[JaxprEqn]) -> None:
    listed = _list_first(eqns, lambda eqn: not has_rule(eqn) and eqn.primitive.name in CALLBACKS)
    if listed:
        warn(
            f"the step calls Python: {listed}. Every device gets the whole operands and makes a call of its own. Compute the "
            "value outside of the step, or in JAX, or let autopar.register_rule say how the call may be split."
        )


def _warn_of_memory_kinds(eqns: Sequence[JaxprEqn]) -> None:
    listed = _list_first(eqns, _leaves_the_devices)
    if listed:
        warn(
            f"the step puts values into the host's memory: {listed}. In a parallel step they stay in the memory of the devices, "
            "and the plan counts them there. Leave the policy that offloads them out, or recompute them (jax.checkpoint)."
        )


def _leaves_the_devices(eqn: JaxprEqn) -> bool:
    """Whether operands are in the devices' memory, and results are not."""
    given, made = ([is_device_memory(v.aval) for v in side] for side in (eqn.invars, eqn.outvars))
    return bool(all(given) and not all(made))


def _list_first(eqns: Sequence[JaxprEqn], is_meant: Callable[[JaxprEqn], bool]) -> str:
    """The primitives among these equations that are meant, each with the user's line that first uses it."""
    found: dict[str, str] = {}
    for eqn in eqns:
        if is_meant(eqn):
            found.setdefault(eqn.primitive.name, source_line(eqn))
    return "; ".join(f"{name} at {line or 'a line that JAX did not keep'}" for name, line in sorted(found.items()))
