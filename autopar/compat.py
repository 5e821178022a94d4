"""The differences between the JAX versions autopar runs on, and the only use of JAX's private modules.

Versions 0.10 to 0.12. Everything here is a thin name for something that moved, was renamed or changed shape; when a
version is dropped, its half goes. Source of each difference: measured on 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax._src import core as private_core
from jax._src import distributed as private_distributed
from jax._src import source_info_util as private_source_info
from jax._src.api_util import InternalFloatingPointError
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


_DISABLE_JIT = "jax_disable_jit"  # which JAX's annotations leave out


def _no_abstract_mesh() -> contextlib.AbstractContextManager[Any]:
    """What can be had inside a function that JAX traces, where `jax.set_mesh` refuses to be called."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context without the caller's mesh and `jax.disable_jit`, for what a step is traced, planned and run in.

    Under a mesh that `jax.set_mesh` made current, whose axes are Explicit by default, a step is traced with types that name its
    axes, and programs for other meshes fail or end the process. Without compilation there is no program for all devices.
    """
    with contextlib.ExitStack() as stack:
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(None) if private_core.trace_state_clean() else _no_abstract_mesh())
        if getattr(jax.config, _DISABLE_JIT):
            stack.enter_context(jax.disable_jit(False))
        yield


@contextlib.contextmanager
def checked_for_nans(name: str) -> Iterator[None]:
    """What `jax.debug_nans` and `jax.debug_infs` find in a program as the FloatingPointError that `jax.jit` makes of it."""
    try:
        yield
    except InternalFloatingPointError as error:
        raise FloatingPointError(
            f"invalid value ({error.ty}) in what {name} returns, found by jax.debug_nans or jax.debug_infs; what it was given to "
            f"consume is gone. The undecorated function, {name}.__wrapped__, under the same setting and jax.jit, names the "
            "operation."
        ) from None


def is_inside_trace() -> bool:
    """Whether this is called inside a function of which JAX makes a program (jit, scan, ...), be its arrays closed over or not.

    `grad` and `vmap` compute at once what depends on none of their own arguments; the second question tells them apart.
    """
    if private_core.trace_state_clean():
        return False
    return isinstance(jax.lax.add(np.int32(0), np.int32(0)), jax.core.Tracer)


def without_explicit_axes(value: Any) -> Any:
    """A value that may be cut: an array on a mesh with Explicit axes as the same one on a mesh of Auto axes, uncopied."""
    given = getattr(value, "sharding", None)
    explicit = jax.sharding.AxisType.Explicit
    if not isinstance(given, jax.sharding.NamedSharding) or explicit not in given.mesh.axis_types:
        return value
    mesh = make_mesh(given.mesh.devices, given.mesh.axis_names)
    return jax.device_put(value, jax.sharding.NamedSharding(mesh, given.spec, memory_kind=given.memory_kind))


def as_it_is_now(value: Any) -> Any:
    """A value for `jax.device_put`: of a NumPy array a copy, in the type that JAX has for it now, so that it may be filled again.

    `device_put` (0.10-0.12) may share the array's memory, also while a program reads it. And it finds what it converted, such as
    integers of 64 bits, by the array's identity for as long as that is in use somewhere: filled again in place, the array would
    be taken for what it was; given under another `jax.enable_x64`, it would end the process.
    """
    if not isinstance(value, np.ndarray):
        return value
    dtype: Any = jax.dtypes.canonicalize_dtype(value.dtype)
    return value.astype(dtype)


def is_threefry_key(dtype: Any) -> bool:
    """Whether a random key's type is threefry's, which shows in nothing but its text, `key<fry>`."""
    return "fry" in str(dtype)


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
