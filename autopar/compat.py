"""The differences between the JAX versions autopar runs on, and the only use of JAX's private modules.

Versions 0.10 to 0.12. Everything here is a thin name for something that moved, was renamed or changed shape; when a
version is dropped, its half goes. Source of each difference: measured on 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax._src import distributed as private_distributed
from jax._src import source_info_util as private_source_info
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import partial_eval

if TYPE_CHECKING:

    class Var:
        """JAX's variable; its `aval` is an array's shape and type here, which JAX's own annotation leaves open."""

        aval: Any

        def __init__(self, aval: Any) -> None:
            """A fresh variable."""

    class Literal:
        """JAX's literal."""

        aval: Any
        val: Any

    class JaxprEqn(Protocol):
        """What autopar reads of a JaxprEqn; `program.Equation` has it too."""

        @property
        def primitive(self) -> Any:
            """The operation."""

        @property
        def params(self) -> dict[str, Any]:
            """Its parameters."""

        @property
        def invars(self) -> Sequence[Any]:
            """Its operands."""

        @property
        def outvars(self) -> Sequence[Any]:
            """Its results."""

        @property
        def source_info(self) -> Any:
            """Where it comes from."""

else:
    JaxprEqn = jex_core.JaxprEqn
    Literal = jex_core.Literal
    Var = jex_core.Var


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants, which 0.12 stores on the same class and 0.10 on another."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def constants_of(jaxpr: Any) -> Sequence[Any]:
    """The constants of a closed jaxpr, none for an open one."""
    return tuple(getattr(jaxpr, "consts", ()) or ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(constants, carries) of a scan equation; 0.12 keeps them in a flat tree, 0.10 as numbers."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def is_drop(var: Any) -> bool:
    """Whether an equation's output is thrown away."""
    return isinstance(var, jex_core.DropVar) if hasattr(jex_core, "DropVar") else type(var).__name__ == "DropVar"


def source_line(eqn: Any) -> str:
    """`file:line (function)` of the user's line that an equation comes from."""
    return str(source_info_util.summarize(eqn.source_info))


def unknown_source() -> Any:
    """Where an operation comes from that no line of the user's asked for."""
    return private_source_info.new_source_info()


def attributed_to(eqn: Any, *, mark: str = "") -> Any:
    """A context in which traced operations carry an equation's source line and scopes, and inside these a mark."""
    info = eqn.source_info
    scopes = info.name_stack.extend(mark) if mark else info.name_stack
    return private_source_info.user_context(info.traceback, name_stack=scopes)


def name_stack(eqn: Any) -> str:
    """The named scopes around an equation, such as `transpose(jvp(block_0))`."""
    return str(eqn.source_info.name_stack)


def eliminate_dead_code(jaxpr: Any) -> Any:
    """The jaxpr without what no output needs, such as stacks of a scan that nobody reads; inputs are kept."""
    result, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return result


def make_mesh(devices: Any, axis_names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh whose axes are Auto: the default is Explicit in 0.12 and Auto in 0.10."""
    auto = jax.sharding.AxisType.Auto
    return jax.sharding.Mesh(devices, axis_names, axis_types=(auto,) * len(axis_names))


def threefry_is_partitionable() -> bool:
    """Whether random bits of a slice can be computed from the slice's positions alone."""
    return bool(getattr(jax.config, "jax_threefry_partitionable", True))


class Coordination(Protocol):
    """What autopar uses of JAX's coordination service, a table of texts that all processes share."""

    def key_value_increment(self, key: str, increment: int) -> int:
        """Add to a number, 0 at first; returns the new one."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Set an entry that does not exist."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait for an entry."""

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """All entries below a path."""


def coordination() -> Coordination | None:
    """The coordination service; None unless `jax.distributed.initialize` was called."""
    client: Coordination | None = private_distributed.global_state.client
    return client
