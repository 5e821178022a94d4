"""What a stranger reads first is true: code runs and prints what is shown, commands parse, lists are complete."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from autopar.commands import parser
from docs import generate
from tests.pages import (
    NEEDS_HARDWARE,
    PAGES,
    README,
    ROOT,
    blocks,
    matches,
    name_of,
    packages_of,
    printed_below,
    run_page,
    shell_lines,
    start_server,
)

DOCS = ROOT / "docs"
WITH_PYTHON = [page for page in PAGES if printed_below(page)]
WORDS_OF_A_FRONT_PAGE = 900


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that runs the pages."""
    with start_server() as process:
        yield process


@pytest.mark.sampled(16)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs_and_prints_what_is_shown_below_it(
    page: Path, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    missing = [package for package in packages_of(page) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    for (block, shown), printed in zip(printed_below(page), run_page(server, page, tmp_path), strict=True):
        if shown is not None:
            assert matches(shown, printed), f"{name_of(page)}, line {block.line} prints:\n{printed}"


def test_every_block_has_a_tag_that_says_whether_it_runs() -> None:
    known = {"python", "text", "console", "sh", "json", "csv", "toml"}
    wrong = [(name_of(page), b.line, b.tag) for page in PAGES for b in blocks(page) if b.tag not in known]
    assert not wrong


def test_a_block_that_does_not_run_says_which_hardware_it_needs() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.tag == "python" and not block.runs:
                assert len(block.text.splitlines()[0]) > len(NEEDS_HARDWARE) + 10, (name_of(page), block.line)


def test_the_front_page_is_short_and_all_of_its_python_runs() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= WORDS_OF_A_FRONT_PAGE
    assert all(block.runs for block in blocks(README) if block.tag == "python")


# --- commands ---------------------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, str]]:
    return [(name_of(page), line) for page in PAGES for line in shell_lines(page)]


AUTOPAR = [(page, line) for page, line in commands() if re.match(r"(python -m )?autopar\b", line)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("page", "line"), AUTOPAR, ids=[f"{page}: {line}" for page, line in AUTOPAR])
def test_a_command_of_autopar_that_a_page_shows_parses(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "cost_model" / "clusters" / "cpu.json", tmp_path / "cluster.json")
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(line.removeprefix("python -m "))[1:]
    if argv[-1] in ("--help", "--version"):
        with pytest.raises(SystemExit, match="0"):
            parser.read(argv)
    else:
        assert parser.read(argv).command == argv[0]


def test_other_commands_that_a_page_shows_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page, line in commands():
        words = shlex.split(line)
        if words and words[0] == "make":
            assert words[1] in targets, (page, line)
        scripts = [word for word in words if re.fullmatch(r"[\w/.]+\.(py|csv)|\.ci/run", word) and "/" in word]
        assert all((ROOT / script).exists() for script in scripts), (page, line)


def test_an_output_below_a_command_is_that_of_this_command() -> None:
    pattern = r"```console\n\$ (autopar .*)\n```\n\n```text\n--8<-- \"docs/output/(\w+)\.txt\""
    found = [pair for page in PAGES for pair in re.findall(pattern, page.read_text(encoding="utf-8"))]
    shown = {name: command for command, name in found}
    assert shown.items() <= {**generate.COMMANDS, **generate.CONCEPTS}.items()
    assert generate.CONCEPTS.keys() <= shown.keys()


def test_the_page_of_a_notebook_is_the_notebook() -> None:
    assert generate.NOTEBOOKS
    for path in generate.NOTEBOOKS:
        for page, text in generate.pages(path, json.loads(path.read_text(encoding="utf-8"))).items():
            assert page.read_text(encoding="utf-8") == text, name_of(page)


@pytest.mark.slow
def test_the_printed_output_and_the_picture_are_what_the_commands_print() -> None:
    """Python's own variables are handed on: readline, which pytest imports, gives a process a width that they do not name."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- lists that must be complete --------------------------------------------------------------------------------------


def test_parallelize_lists_every_argument_it_takes() -> None:
    text = inspect.getdoc(autopar.parallelize) or ""
    listed = re.findall(r"^    (\w+): ", text.partition("\nArgs:\n")[2].partition("\nReturns:\n")[0], re.MULTILINE)
    assert listed == list(inspect.signature(autopar.parallelize).parameters)


def test_each_framework_has_a_recipe_that_runs() -> None:
    recipes = {page: page.read_text(encoding="utf-8") for page in (DOCS / "howto").glob("*.md")}
    for framework in ("flax.linen", "flax.nnx", "equinox", "haiku", "keras", "transformers", "numpyro"):
        found = [
            page for page, text in recipes.items() if re.search(rf"^# .*{framework}|^## {framework}", text, re.M | re.I)
        ]
        assert any(printed_below(page) for page in found), framework


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    missing = [name for name in autopar.__all__ if f"::: autopar.{name}\n" not in text]
    assert not missing


def test_the_map_names_every_room_and_no_other() -> None:
    package = ROOT / "autopar"
    rooms = {
        Path(folder).relative_to(package).as_posix()
        for folder, _, files in os.walk(package, followlinks=True)
        if "__init__.py" in files
    }
    text = (DOCS / "inside" / "map.md").read_text(encoding="utf-8")
    assert {name.removesuffix("/") for name in re.findall(r"^\| `([\w/]+/)` \|", text, re.MULTILINE)} == rooms - {"."}


# --- the site ---------------------------------------------------------------------------------------------------------

LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//|<link\b[^>]*\bhref=\"(?:https?:)?//")
"""What a browser would load from another host; links that a reader may follow are not among it."""


@pytest.mark.sweep
def test_the_site_builds_without_a_warning_and_loads_nothing_from_another_host(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not LOADED.search(page.read_text(encoding="utf-8")), page
    svg = (tmp_path / "site" / "images" / "plan.svg").read_text(encoding="utf-8")
    assert "url(http" not in svg
    assert "@import" not in svg
