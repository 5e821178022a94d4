"""`doctor`: checks whether autopar and JAX work here, and shows the devices and their prices.

Out: a line for each check, with its finding and whether that is good. Nothing is changed. What can go wrong: a check raises. Its
line then holds the error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.table import Table
from rich.text import Text

import autopar
from autopar.commands.arguments.devices import ask_for_virtual_devices, find_devices
from autopar.commands.terminal.printing import new_table, print_json
from autopar.compat import make_mesh
from autopar.cost_model.cores import available_cores
from autopar.cost_model.hardware import find_preset
from autopar.errors import ArgumentError
from autopar.explain import standard_output
from autopar.explain.units import bytes_text, seconds_text
from autopar.plan_cache.folder import cache_folder
from autopar.settings import allocatable_bytes

UNWELL = 1
State = Literal["well", "note", "wrong"]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "pulp", "highspy", "networkx")
OPTIONAL = ("orbax-checkpoint", "grain", "tensorboard")
_MEASURED_BYTES = 4 * 2**20
_ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        state: `well`, `note` (works, and worth knowing) or `wrong`.
        text: what was found.
    """

    name: str
    state: State
    text: str


def doctor(options: argparse.Namespace) -> int:
    """Run `doctor`; 0 if nothing is wrong."""
    if options.devices is not None or jax.config.jax_platforms in (None, "", "cpu"):  # type: ignore[attr-defined]
        ask_for_virtual_devices(options.devices or 8)
    findings = list(examine(options.devices))
    if options.json:
        print_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        standard_output().print(make_table(findings))
    return UNWELL if any(finding.state == "wrong" for finding in findings) else 0


def examine(count: int | None) -> Iterator[Finding]:
    """Yield what each check finds; one that raises is wrong, with what it raised."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("machine", _machine),
        ("packages", _packages),
        ("plan cache", _plan_cache),
        ("devices", lambda: _devices(count)),
        ("collectives", lambda: _collectives(count)),
        ("links", lambda: _links(count)),
        ("a step", lambda: _step(count)),
    )
    said = dict[str, str]()
    for name, check in checks:
        try:
            yield from check()
        except ArgumentError as error:
            words = str(error)
            yield Finding(name, "wrong", f"as {said[words]}" if words in said else words)
            said.setdefault(words, name)
        except Exception as error:  # noqa: BLE001 - whatever a check raises is what it found
            where = traceback.extract_tb(error.__traceback__)[-1]
            yield Finding(name, "wrong", f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")


def _machine() -> Iterator[Finding]:
    yield Finding("Python", "well", f"{platform.python_version()} on {platform.platform()}, {available_cores()} cores")
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        if os.environ.get(name):
            yield Finding(name, "note", os.environ[name])


def _packages() -> Iterator[Finding]:
    yield Finding("autopar", "well", str(autopar.__version__))
    for name in PACKAGES:
        found = _version(name)
        yield Finding(name, "well" if found else "wrong", found or f"is not installed: pip install {name}")
    missing = [name for name in OPTIONAL if _version(name) is None]
    if missing:
        yield Finding("optional packages", "note", f"not installed: {', '.join(missing)}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _plan_cache() -> Iterator[Finding]:
    folder = cache_folder()
    if folder is None:
        yield Finding("plan cache", "note", "off, by AUTOPAR_CACHE")
        return
    yield Finding("plan cache", "well", f"{len(folder.files())} plans in {folder.path}")


def _devices(count: int | None) -> Iterator[Finding]:
    """The devices, the cluster that stands for them, and whether that is a guess."""
    devices = find_devices(count)
    first = devices[0]
    kinds = {device.device_kind for device in devices}
    yield Finding("devices", "well", f"{len(devices)} of platform {first.platform}, kind {', '.join(sorted(kinds))}")
    if jax.process_count() > 1:
        yield Finding("processes", "note", f"{jax.process_count()}, this is {jax.process_index()}")
    nearest = find_preset(first.platform, first.device_kind)
    known = f"the preset {nearest.cluster.name}"
    if nearest.guess:
        yield Finding("cluster", "note", nearest.guess)
    elif first.platform == "cpu":
        yield Finding("cluster", "note", f"{known}, for virtual devices; `autopar calibrate` measures these")
    else:
        yield Finding("cluster", "well", known)
    limit = allocatable_bytes(first)
    if limit:
        usable = nearest.cluster.usable_memory_bytes
        text = f"JAX has {bytes_text(limit)} of a device, the cluster says {bytes_text(usable)}"
        more = "; plans keep to the former, XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 gives more"
        yield Finding("memory", "well", text) if limit >= usable else Finding("memory", "note", text + more)


def _collectives(count: int | None) -> Iterator[Finding]:
    """Every kind of collective over all devices, compared with what it should give."""
    devices = find_devices(count)
    n = len(devices)
    if n == 1:
        yield Finding("collectives", "note", "one device needs none")
        return
    rows = np.arange(n * n, dtype=np.float32).reshape(n, n)
    kinds: dict[str, tuple[Callable[[jax.Array], jax.Array], np.ndarray]] = {
        "all-reduce": (lambda x: jax.lax.psum(x, "x"), np.tile(rows.sum(0), (n, 1))),
        "all-gather": (lambda x: jax.lax.all_gather(x[0], "x")[:, :1].T, np.tile(rows[:, 0], (n, 1))),
        "reduce-scatter": (
            lambda x: jax.lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
            rows.sum(0)[:, None],
        ),
        "all-to-all": (lambda x: jax.lax.all_to_all(x, "x", 1, 1, tiled=True), rows.T),
        "permute": (lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % n) for i in range(n)]), np.roll(rows, 1, 0)),
    }
    wrong = [name for name, (fun, expected) in kinds.items() if not _gives(fun, rows, expected, devices)]
    if wrong:
        yield Finding("collectives", "wrong", f"wrong numbers from: {', '.join(wrong)}")
    else:
        yield Finding("collectives", "well", f"{', '.join(kinds)} over {n} devices give the right numbers")


def _gives(
    fun: Callable[[jax.Array], jax.Array], rows: np.ndarray, expected: np.ndarray, devices: Sequence[jax.Device]
) -> bool:
    return bool(np.array_equal(np.asarray(_on_all(fun, devices)(rows)), expected))


def _on_all(fun: Callable[[jax.Array], jax.Array], devices: Sequence[jax.Device]) -> Callable[..., jax.Array]:
    """The function on each device's row of an array, compiled."""
    mesh, spec = make_mesh(np.array(devices), ("x",)), PartitionSpec("x")
    return jax.jit(
        jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        in_shardings=NamedSharding(mesh, spec),
    )


def _links(count: int | None) -> Iterator[Finding]:
    """How long an all-reduce takes, beside what the cluster says."""
    devices = find_devices(count)
    n = len(devices)
    if n == 1:
        return
    run = _on_all(lambda x: jax.lax.psum(x, "x"), devices)
    rows = jnp.ones((n, _MEASURED_BYTES // 4), jnp.float32)
    jax.block_until_ready(run(rows))
    seconds = statistics.median(_seconds_of(run, rows) for _ in range(_ROUNDS))
    cluster = find_preset(devices[0].platform, devices[0].device_kind).cluster
    predicted = cluster.mesh_costs((n,)).seconds("all-reduce", _MEASURED_BYTES, (0,))
    ratio = seconds / predicted
    text = (
        f"an all-reduce of {bytes_text(_MEASURED_BYTES)} over {n} devices takes {seconds_text(seconds)}, predicted "
        f"{seconds_text(predicted)} ({ratio:.2g} times)"
    )
    is_near = 0.5 <= ratio <= 2.0
    yield Finding(
        "links", "well" if is_near else "note", text + ("" if is_near else ": `autopar calibrate` would help")
    )


def _seconds_of(run: Callable[..., jax.Array], rows: jax.Array) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run(rows))
    return time.perf_counter() - began


def _step(count: int | None) -> Iterator[Finding]:
    """A small step, planned and run on all devices, beside `jax.jit` on one."""

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w) - batch) ** 2))(weights)
        return weights - 0.1 * gradient, loss

    devices = find_devices(count)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(16, 16)).astype(np.float32)
    batch = rng.normal(size=(8 * len(devices), 16)).astype(np.float32)
    expected = jax.jit(step)(jnp.asarray(weights), jnp.asarray(batch))
    parallel = autopar.parallelize(step, devices=devices, plan_cache=False)
    found = parallel(jnp.asarray(weights), jnp.asarray(batch))
    error = max(float(np.max(np.abs(np.asarray(a) - np.asarray(e)))) for a, e in zip(found, expected, strict=True))
    is_right = error < 1e-5
    yield Finding(
        "a step",
        "well" if is_right else "wrong",
        f"planned and run on {len(devices)} devices: {error:.1e} from jax.jit",
    )


def make_table(findings: Sequence[Finding]) -> Table:
    """A row for each finding."""
    table = new_table("", "", "", "", words=("",))
    table.show_header = False
    for finding in findings:
        table.add_row(*map(Text, (finding.name, finding.state, finding.text)))
    return table
