"""Settings that hold for every test: eight virtual CPU devices, and hypothesis without chance or clock.

XLA reads its flags when JAX first touches a device, so they are set here, before any test module imports JAX. Whatever
the caller's environment says about platform and caches does not apply to the tests. Plans are
not kept: tests of the plan cache give it a folder of their own.

A run without the slow tests compiles quickly, with a third of the work: XLA leaves LLVM's optimisation out, hands each module
to LLVM in one part and, with JAX 0.10, emits fused kernels without MLIR; and JAX 0.10 makes fewer MLIR contexts. Then XLA may
fuse a few operations differently; collectives stay the same, and memory stays within what its tests allow. A program that one
process has compiled is not compiled by another: they share a folder, which is there for one run. A run with the slow tests,
and any other run, compiles as users do.

Tests start many processes, and xdist a few: compiled Python is kept, whatever the environment says, so that each of autopar's
modules is compiled once.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.metadata import version

from tests.ir_contexts import share_contexts
from tests.sampling import mark_sweeps
from tests.seldom_collected import collect_seldom, leave_alone_what_lives
from tests.xla_flags import DEVICE_COUNT, DEVICES, QUICK_COMPILE

assert "jax" not in sys.modules, "JAX was imported before tests/conftest.py could set the number of devices"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["AUTOPAR_CACHE"] = "off"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "autopar", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("autopar")

LONGEST = ("random_programs", "harnesses")
"""Folders of tests of 10 seconds and more."""


def pytest_configure(config: pytest.Config) -> None:
    """Compile quickly where the slow tests are left out; no test module has touched a device before this.

    Ctrl-C works as in a terminal, also where the tests run in the background of a shell, whose processes ignore it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not slow" in config.option.markexpr and "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {QUICK_COMPILE}"
        folder = share_compiled()
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def share_compiled() -> str:
    """A new folder in which this process, xdist's workers and what they start keep compiled programs for each other."""
    folder = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sweeps get their mark before tests are chosen by marks. The longest tests first: at the end, others would wait for them."""
    mark_sweeps(items)
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Garbage is collected seldom; and where modules are compiled quickly, they share MLIR contexts."""
    if QUICK_COMPILE in os.environ["XLA_FLAGS"]:
        share_contexts()
    collect_seldom()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What is there at the end of a test file, such as JAX's caches, stays too: a collection walks over one file's objects."""
    yield
    if nextitem is None or nextitem.path != item.path:
        leave_alone_what_lives()


def pytest_report_header() -> str:
    """The end of the supported JAX range that this run is about, and whether compiled code is optimised."""
    how = "quickly compiled" if QUICK_COMPILE in os.environ["XLA_FLAGS"] else "optimised"
    return f"JAX {version('jax')}, {DEVICE_COUNT} virtual CPU devices, {how}"


@pytest.fixture(autouse=True, scope="session")
def no_terminal_width() -> None:
    """Reports are as wide as without a terminal: pytest-xdist hands its own width to its workers."""
    os.environ.pop("COLUMNS", None)
