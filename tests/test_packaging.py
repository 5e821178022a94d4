"""What a user installs is what the repository holds, and importing it changes nothing.

Oracle for the wheel: the source tree walked without links, where `cost_model/`, `runtime/` and `models/` at the root
stand for the packages of that name inside `autopar/`.
"""

import importlib.metadata
import os
import pkgutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import autopar

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("cost_model", "models", "runtime")


def names_in_folder(folder: Path) -> set[str]:
    """Paths below `folder` of the files that belong in a package; links to folders are not followed."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix in {".j2", ".json", ".py", ".typed"})
    return {path.relative_to(folder).as_posix() for path in files}


def names_in_source_tree() -> set[str]:
    linked = {f"autopar/{folder}/{name}" for folder in LINKED for name in names_in_folder(ROOT / folder)}
    own = {f"autopar/{name}" for name in names_in_folder(ROOT / "autopar") if name.split("/")[0] not in LINKED}
    return linked | own


def names_in_wheel(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def run(command: list[str], **options: Any) -> str:
    """What `command` prints; if it fails, its errors are the test's message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(target: str, *, source: Path, into: Path) -> Path:
    """The wheel or sdist of `source`; no network: the build backend runs in this environment."""
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)], cwd=source)
    (built,) = into.iterdir()
    return built


def run_in_fresh_interpreter(program: str) -> str:
    """What `program` prints in an environment without the settings of the tests, or of what they have imported."""
    environment = {"AUTOPAR_CACHE": "off", "JAX_PLATFORMS": "cpu", "PATH": os.environ["PATH"]}
    return run([sys.executable, "-c", program], cwd=ROOT, env=environment)


@pytest.mark.parametrize("name", LINKED)
def test_a_relative_link_leads_from_the_package_to_the_folder_at_the_root(name: str) -> None:
    assert os.readlink(ROOT / "autopar" / name) == f"../{name}"
    assert (ROOT / "autopar" / name / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_the_wheel_holds_exactly_the_source_tree(tmp_path: Path) -> None:
    wheel = build("wheel", source=ROOT, into=tmp_path)
    assert names_in_wheel(wheel) == names_in_source_tree()
    assert "autopar/py.typed" in names_in_wheel(wheel)


def test_a_wheel_built_from_the_sdist_is_the_same(tmp_path: Path) -> None:
    sdist = build("sdist", source=ROOT, into=tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    wheel = build("wheel", source=unpacked, into=tmp_path / "wheel")
    assert names_in_wheel(wheel) == names_in_source_tree()


NOT_INSTALLED = """
import importlib.metadata

def from_name(name, found=importlib.metadata.Distribution.from_name):
    if name == "autopar":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

importlib.metadata.Distribution.from_name = from_name
import autopar
from autopar.__main__ import main
print(autopar.__version__)
assert main(["plan", "mlp", "--devices", "2", "--cluster", "cpu"]) == 0
assert main(["doctor", "--devices", "1"]) in (0, 1)
main(["--version"])
"""


def test_a_checkout_that_is_not_installed_runs_and_states_its_own_version() -> None:
    said = run_in_fresh_interpreter(NOT_INSTALLED).splitlines()
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert said[0] == f"{stated}+checkout"
    assert said[-1] == f"autopar {stated}+checkout"


def test_a_copy_without_metadata_and_project_file_has_a_version_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    monkeypatch.setattr(autopar, "__file__", str(tmp_path / "autopar" / "__init__.py"))
    assert autopar.__version__ == "0+unknown"


CHANGES_NOTHING = """
import os, sys, warnings
import jax, jax.numpy, jax.lax, numpy, {dependencies}

def settings():
    return dict(os.environ), dict(jax.config.values), list(warnings.filters)

modules = [module for name, module in sys.modules.items() if name.split(".")[0] in ("jax", "numpy")]
contents = [dict(vars(module)) for module in modules]
before = settings()
import {module}
assert settings() == before, (settings(), before)
for module, old in zip(modules, contents):
    changed = [name for name in old if getattr(module, name, None) is not old[name]]
    assert not changed, (module.__name__, changed)
jax.config.update("jax_num_cpu_devices", 3)  # raises if a backend has been initialised
assert jax.device_count("cpu") == 3
"""


def importable_modules() -> list[str]:
    modules = pkgutil.walk_packages(autopar.__path__, prefix="autopar.")
    return sorted(module.name for module in modules if not module.name.endswith("__main__"))


def test_importing_autopar_changes_nothing_global() -> None:
    run_in_fresh_interpreter(CHANGES_NOTHING.format(dependencies="flax, optax", module="autopar"))


def test_importing_any_module_of_autopar_changes_nothing_global() -> None:
    run_in_fresh_interpreter(
        CHANGES_NOTHING.format(dependencies="flax.linen, optax", module=", ".join(importable_modules()))
    )


def test_public_names_of_packages_need_no_import_of_their_own() -> None:
    run_in_fresh_interpreter(
        "import sys, autopar\n"
        "assert 'jax' not in sys.modules\n"
        "autopar.checkpoints.Checkpoints, autopar.data.sharded, autopar.launch.join, autopar.monitor.Monitor\n"
        "autopar.solver.to_pulp, autopar.testing.faults, autopar.training.Guard\n"
        "assert {'data', 'training'} <= {*dir(autopar)}"
    )
