"""The differences between the JAX versions autopar runs on, and the only use of JAX's private modules.

Versions 0.10 to 0.12. Everything here is a thin name for something that moved, was renamed or changed shape. When a version is
dropped, its half goes. Each difference was observed on 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import jax
import numpy as np
from jax._src import config as private_config
from jax._src import core as private_core
from jax._src import distributed as private_distributed
from jax._src import dtypes as private_dtypes
from jax._src import source_info_util as private_source_info
from jax._src.api_util import InternalFloatingPointError
from jax._src.random import core as private_random
from jax._src.random import prng as private_prng
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import partial_eval

SourceInfo = private_source_info.SourceInfo
Params = dict[str, Any]
"""Parameters of an equation by name: whatever its primitive defines."""
T = TypeVar("T")
HAVE_SHARDING = (
    ("reduce_max", "reduce_min") if "out_sharding" in inspect.signature(jax.lax.reduce_max).parameters else ()
)
"""Operations whose parameter `out_sharding` JAX 0.12 asks for under a mesh, though elsewhere it may be left out."""

if TYPE_CHECKING:

    class Var:
        """JAX's variable; its `aval` is an array's shape and type here, which JAX's own annotation leaves open."""

        aval: jax.core.ShapedArray

        def __init__(self, aval: jax.core.AbstractValue) -> None:
            """A fresh variable."""

    class Literal:
        """JAX's literal."""

        aval: jax.core.ShapedArray
        val: object

    class JaxprEqn(Protocol):
        """What autopar reads of a JaxprEqn; `program.Equation` has it too."""

        @property
        def primitive(self) -> jex_core.Primitive:
            """The operation."""

        @property
        def params(self) -> Params:
            """Its parameters."""

        @property
        def invars(self) -> Sequence[Var | Literal]:
            """Its operands."""

        @property
        def outvars(self) -> Sequence[Var]:
            """Its results."""

        @property
        def source_info(self) -> SourceInfo:
            """Where it comes from."""

else:
    JaxprEqn = jex_core.JaxprEqn
    Literal = jex_core.Literal
    Var = jex_core.Var


RECOMPUTED = "rematted_computation"
"""The scope that JAX opens around what the backward pass computes again."""
_SCOPES_OF_JAX = frozenset({"", RECOMPUTED, "checkpoint", "while", "body", "cond", "closed_call"})
"""Scopes that JAX opens by itself, or that have no name."""


def open_jaxpr(jaxpr: object) -> jex_core.Jaxpr:
    """The jaxpr without its constants, which 0.12 stores on the same class and 0.10 on another."""
    return cast(jex_core.Jaxpr, getattr(jaxpr, "jaxpr", jaxpr))


def constants_of(jaxpr: object) -> Sequence[jax.typing.ArrayLike]:
    """The constants of a closed jaxpr, none for an open one."""
    return tuple(getattr(jaxpr, "consts", ()) or ())


def scan_counts(params: Params) -> tuple[int, int]:
    """(constants, carries) of a scan equation; 0.12 keeps them in a flat tree, 0.10 as numbers."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def static_arguments(fun: object) -> tuple[int | str, ...]:
    """Numbers and names of the arguments that `jax.jit`, or `flax.nnx.jit`, of a function takes as static."""
    info = getattr(getattr(fun, "jitted_fn", fun), "_jit_info", None)
    return (*(getattr(info, "static_argnums", None) or ()), *(getattr(info, "static_argnames", None) or ()))


def source_line(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the line of the user's model that an equation comes from; empty if none asked for it.

    Where an installed library made the operation, it is the line that called the library from within the step. Where all of the
    step is a library's, it is the library's own.
    """
    trace: Any = eqn.source_info.traceback
    codes, places = ([], []) if trace is None else trace.raw_frames()
    for code, place in zip(codes, places, strict=True):
        if _is_in(code.co_filename, "program"):  # it called the step
            break
        if _is_users(code.co_filename):
            frame = private_source_info.raw_frame_to_frame(code, place)
            column = f":{frame.start_column}" if frame.start_column else ""
            return f"{frame.file_name}:{frame.start_line}{column} ({frame.function_name})"
    line = str(source_info_util.summarize(eqn.source_info))
    return "" if _is_autopars(line) else line


def _is_autopars(text: str) -> bool:
    """Whether a line is one of autopar's own."""
    return _is_in(text, "") and not _is_in(text, "models")


@functools.cache
def _is_users(filename: str) -> bool:
    """Whether a file is neither JAX's, nor autopar's, nor an installed library's; the example models stand for a user's."""
    is_installed = any(f"{os.sep}{name}{os.sep}" in filename for name in ("site-packages", "dist-packages"))
    is_others = is_installed or _is_in(filename, "") or not private_source_info.is_user_filename(filename)
    return _is_in(filename, "models") or not is_others


@functools.cache
def _is_in(filename: str, folder: str) -> bool:
    """Whether a file is in this folder of autopar."""
    return filename.startswith(os.path.join(os.path.dirname(__file__), folder, ""))


def is_defined_by_equinox(primitive: jex_core.Primitive) -> bool:
    """Whether it is one of those that equinox runs, and maps, as functions of other operations.

    These are `vprim`, which stands for a mapped one, the steps of its loops and the linear solvers of lineax.
    """
    return primitive in _defined_by_equinox()


def _defined_by_equinox() -> Mapping[jex_core.Primitive, Callable[..., object]]:
    """Equinox's own table of them, empty while equinox is not imported."""
    return cast(
        Mapping[jex_core.Primitive, Callable[..., object]],
        getattr(sys.modules.get("equinox.internal._primitive"), "_vprim_impl_registry", {}),
    )


def implementation_of(primitive: jex_core.Primitive) -> Callable[..., object]:
    """The function of other operations by which a primitive is defined: JAX's own, or equinox's.

    The sparse formats keep theirs in a module for each; some of their primitives know only how to bind themselves.
    """
    if primitive in _defined_by_equinox():
        return _defined_by_equinox()[primitive]
    kind, _, _ = primitive.name.partition("_")
    if kind not in ("bcoo", "bcsr", "coo", "csr"):
        return primitive.impl
    module = importlib.import_module(f"jax.experimental.sparse.{kind}")
    return cast(Callable[..., object], getattr(module, f"_{primitive.name}_impl"))


def is_device_memory(aval: object) -> bool:
    """Whether a value lies in the devices' own memory, as all do but those that were put into the host's."""
    return getattr(getattr(aval, "memory_space", None), "name", "Device") != "Host"


def functions_around(eqn: JaxprEqn) -> Iterator[str]:
    """Names of the functions whose calls led to an equation, innermost first, such as `BatchNorm.__call__`."""
    trace: Any = eqn.source_info.traceback
    for frame in () if trace is None else trace.frames:
        yield str(frame.function_name)


def unknown_source() -> SourceInfo:
    """The source of an operation that no line of the user's asked for."""
    return private_source_info.new_source_info()


def attributed_to(eqn: JaxprEqn, *, out_of: JaxprEqn | None = None) -> contextlib.AbstractContextManager[None]:
    """A context in which traced operations carry an equation's source line and scopes, and those of a loop that it leaves."""
    info, outer = eqn.source_info, private_source_info.NameStack() if out_of is None else out_of.source_info.name_stack
    return private_source_info.user_context(info.traceback, name_stack=outer + info.name_stack)


def name_stack(eqn: JaxprEqn) -> str:
    """The named scopes around an equation, such as `transpose(jvp(block_0))`."""
    return str(eqn.source_info.name_stack)


def module_path(eqn: JaxprEqn) -> str:
    """The modules and named scopes that an equation comes from, outermost first, such as `GPT/block_0/ffn/up`; empty if none.

    Methods, which flax writes behind a dot, JAX's transformations and the formula of an einsum are no part of it.
    """
    parts = eqn.source_info.name_stack.stack
    names = "/".join(part.name for part in parts if not isinstance(part, private_source_info.Transform)).split("/")
    scopes = [s for s in (one.partition(".") for one in names if "->" not in one) if s[0] not in _SCOPES_OF_JAX]
    return "/".join(s[0] for n, s in enumerate(scopes) if not (s[1] and n and scopes[n - 1][0] == s[0]))


def transformations(eqn: JaxprEqn) -> frozenset[str]:
    """JAX's transformations that made an equation, such as jvp and transpose, and `RECOMPUTED` for work of `jax.checkpoint`.

    A scope that the user opens is none of them, whatever its name.
    """
    parts = eqn.source_info.name_stack.stack
    return frozenset(
        part.name for part in parts if isinstance(part, private_source_info.Transform) or part.name == RECOMPUTED
    )


def eliminate_dead_code(jaxpr: jex_core.Jaxpr) -> jex_core.Jaxpr:
    """The jaxpr without operations that no output needs, such as stacks of a scan that nobody reads; inputs are kept."""
    result, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return result


def make_mesh(devices: np.ndarray, axis_names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A mesh whose axes are Auto: the default is Explicit in 0.12 and Auto in 0.10."""
    auto = jax.sharding.AxisType.Auto
    return jax.sharding.Mesh(devices, axis_names, axis_types=(auto,) * len(axis_names))


def settings_of_traces() -> Mapping[str, Callable[..., contextlib.AbstractContextManager[object]]]:
    """The settings by which JAX tells traces apart, each with its context manager; each version has others."""
    states = private_config.config_states
    return {name: states[name] for name in _names_of_traces() if name in states and hasattr(jax.config, name)}


def users_contexts() -> tuple[Hashable, ...]:
    """The present values of the contexts that the user made by `jax.make_user_context`, by which JAX tells traces apart too."""
    present = zip(_names_of_traces(), private_config.trace_context(), strict=False)
    return tuple(value for name, value in present if name == "user_context")


def _names_of_traces() -> Sequence[str]:
    """The names of what JAX tells traces apart by; where it does not tell them (0.10.0), of its best known settings."""
    told = getattr(private_config, "trace_context_names", None)
    with contextlib.suppress(NotImplementedError):  # how a JAX whose compiled part cannot tell them says so
        if told is not None:
            return cast(Sequence[str], told())
    known = "enable_x64 numpy_dtype_promotion numpy_rank_promotion random_seed_offset threefry_partitionable"
    return [f"jax_{name}" for name in ("default_matmul_precision", *known.split())]


_DISABLE_JIT = "jax_disable_jit"  # which JAX's annotations leave out
_CALLERS_MESH: contextvars.ContextVar[Mapping[str, int] | None] = contextvars.ContextVar("callers_mesh", default=None)


def callers_mesh() -> Mapping[str, int] | None:
    """Axis names and sizes of the mesh that the caller made current around `undisturbed`; None if there is none."""
    return _CALLERS_MESH.get()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context without the caller's mesh and `jax.disable_jit`, in which steps are traced, planned and run.

    Under a mesh that `jax.set_mesh` made current, whose axes are Explicit by default, a step is traced with types that name its
    axes, and programs for other meshes fail or end the process. Without compilation there is no program for all devices.
    """
    with contextlib.ExitStack() as stack:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            stack.callback(_CALLERS_MESH.reset, _CALLERS_MESH.set(dict(mesh.shape)))
            # In a function that JAX traces, `jax.set_mesh` refuses to be called.
            none = jax.sharding.AbstractMesh((), ())
            is_free = private_core.trace_state_clean()
            stack.enter_context(jax.set_mesh(None) if is_free else jax.sharding.use_abstract_mesh(none))
        if getattr(jax.config, _DISABLE_JIT):
            stack.enter_context(jax.disable_jit(False))
        yield


@contextlib.contextmanager
def checked_for_nans(name: str) -> Iterator[None]:
    """A context that turns what `jax.debug_nans` and `jax.debug_infs` find into a FloatingPointError, as `jax.jit` does."""
    try:
        yield
    except InternalFloatingPointError as error:
        raise FloatingPointError(
            f"invalid value ({error.ty}) in what {name} returns, found by jax.debug_nans or jax.debug_infs. The undecorated "
            f"function, {name}.__wrapped__, under the same setting and jax.jit, names the operation."
        ) from None


def is_inside_trace() -> bool:
    """Whether the caller is inside a function that JAX turns into a program (jit, scan, ...).

    `grad` and `vmap` trace too, and compute at once what depends on none of their own arguments; an operation on constants tells
    them apart, as it has a value there.
    """
    if private_core.trace_state_clean():
        return False
    return isinstance(jax.lax.add(np.int32(0), np.int32(0)), jax.core.Tracer)


def without_explicit_axes(value: T) -> T:
    """The value in a form that may be sliced: an array on a mesh with Explicit axes moves to Auto axes without a copy."""
    given = getattr(value, "sharding", None)
    explicit = jax.sharding.AxisType.Explicit
    if not isinstance(given, jax.sharding.NamedSharding) or explicit not in given.mesh.axis_types:
        return value
    mesh = make_mesh(given.mesh.devices, given.mesh.axis_names)
    return cast(T, jax.device_put(value, jax.sharding.NamedSharding(mesh, given.spec, memory_kind=given.memory_kind)))


def introduce_arrays(kind: type, as_numpy: Callable[..., np.ndarray]) -> None:
    """Let `jax.device_put` take arrays of a kind, which has `shape`, `dtype` and `weak_type`, by their copies on the host."""
    private_core.pytype_aval_mappings[kind] = lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
    private_dtypes.canonicalize_value_handlers[kind] = as_numpy


def words_of(array: jax.Array) -> jax.Array:
    """The array that a key array lies in, whose sharding is at hand: JAX derives that of keys anew, in 0.1 ms; or the array."""
    return getattr(array, "_base_array", array)


COPIES_BRANCHES = MOVES_FACTORS = jax.__version_info__ < (0, 12)
WRITES_TURNED = not COPIES_BRANCHES  # what XLA does: see those who ask
THREEFRY = "threefry2x32"
HASHES = (THREEFRY, "threefry4x32", "philox2x32", "philox4x32")  # their bits are hashes of a key and a position


def generator_of(dtype: object) -> str:
    """The name of the generator of a random key's type; empty for other types."""
    return str(getattr(getattr(dtype, "_impl", None), "name", ""))


def draw_words(eqn: JaxprEqn, *operands: jax.Array) -> jax.Array:
    """What an equation that makes keys or draws bits gives for the words of its keys: words of keys, or bits."""
    keys, draw = eqn.invars[0].aval, getattr(private_prng, f"{eqn.primitive.name}_impl_base")
    if eqn.primitive.name == "random_seed":
        return cast(jax.Array, draw(operands[0], impl=eqn.params["impl"]))
    given = keys.shape if eqn.primitive.name == "random_fold_in" else len(keys.shape)
    return cast(jax.Array, draw(keys.dtype._impl, *operands, given, **eqn.params))


def hash_function(name: str) -> Callable[..., Sequence[jax.Array]]:
    """The function of other operations that a hash of a generator stands for, by its primitive's name."""
    module = importlib.import_module(f"jax._src.random.{name}")
    return cast(Callable[..., Sequence[jax.Array]], getattr(module, f"_{name}_lowering"))


def threefry_is_partitionable() -> bool:
    """Whether random bits of a slice can be computed from the slice's positions alone."""
    return bool(getattr(jax.config, "jax_threefry_partitionable", True))


def draw_gammas(keys: jax.Array, parameters: jax.Array, log_space: bool) -> jax.Array:
    """A gamma sample for each parameter, of any shape, with the key of its row-major position: as `jax.random.gamma` does."""
    draw_one = functools.partial(private_random._gamma_one, log_space=log_space)
    samples: jax.Array = jax.vmap(draw_one)(keys, parameters.ravel())
    return samples.reshape(parameters.shape)


class Coordination(Protocol):
    """What autopar uses of JAX's coordination service, a table of texts that all processes share."""

    def key_value_delete(self, key: str) -> None:
        """Delete an entry, or all below a path that ends with a slash."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Set an entry that does not exist."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait for an entry."""

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """All entries below a path."""


def coordination() -> Coordination | None:
    """The coordination service; None unless `jax.distributed.initialize` was called."""
    return cast(Coordination | None, private_distributed.global_state.client)
