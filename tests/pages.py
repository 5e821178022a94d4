"""README and the pages of docs/ as data: their blocks of code, and what a page's Python prints when it runs.

A fenced block is known by its tag. Blocks tagged `python` are run, page by page, in order and in one namespace, as a reader would
paste them. A `text` block right below one is what it prints, where `...` stands for anything. A Python block whose first line is
`# needs hardware: ...` is shown and not run. With `# needs packages: ...` the page runs only where these are.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<tag>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```\s*?$", re.DOTALL | re.MULTILINE
)
SNIPPET = re.compile(r"^ *--8<-- \"(?P<path>[^\":]+)\"\n", re.MULTILINE)
NEEDS_HARDWARE = "# needs hardware: "
NEEDS_PACKAGES = "# needs packages: "


@dataclass(frozen=True)
class Block:
    """A fenced block: its tag, its text without indentation, its first line's number, and where it ends in the page's text."""

    tag: str
    text: str
    line: int
    start: int
    end: int

    @property
    def runs(self) -> bool:
        """Whether it is Python that can run here."""
        return self.tag == "python" and not self.text.startswith(NEEDS_HARDWARE)


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, with the files that they include."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            match["tag"],
            SNIPPET.sub(
                lambda found: (ROOT / found["path"]).read_text(encoding="utf-8"), textwrap.dedent(match["text"])
            ),
            text.count("\n", 0, match.start("text")) + 1,
            match.start(),
            match.end(),
        )
        for match in FENCE.finditer(text)
    ]


def printed_below(page: Path) -> list[tuple[Block, str | None]]:
    """The Python blocks of a page that run, each with the text block right below it, if there is one."""
    text, found = page.read_text(encoding="utf-8"), blocks(page)
    pairs: list[tuple[Block, str | None]] = []
    for number, block in enumerate(found):
        if block.runs:
            below = found[number + 1] if number + 1 < len(found) else None
            is_output = below is not None and below.tag == "text" and not text[block.end : below.start].strip()
            pairs.append((block, below.text if below is not None and is_output else None))
    return pairs


SERVE = """
import contextlib, io, json, os, sys, traceback
import numpy
import jax
import autopar
from tests.ir_contexts import share_contexts
from tests.seldom_collected import collect_seldom
autopar.parallelize
share_contexts()
collect_seldom()


def run(page, cells, folder, environment):
    os.chdir(folder)
    os.environ.update(environment)
    names = {"__name__": "__main__"}
    printed = []
    for line, text in cells:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\\n" * (line - 1) + text, page, "exec"), names)
        printed.append(out.getvalue())
    with open("printed.json", "w") as file:
        json.dump(printed, file)


for request in sys.stdin:
    page, cells, folder, environment = json.loads(request)
    child = os.fork()
    if not child:
        for stream, name in ((0, os.devnull), (1, os.devnull), (2, os.path.join(folder, "errors.txt"))):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
        try:
            run(page, cells, folder, environment)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stderr.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs pages, each in a fork of a process that has imported JAX and autopar, and has touched no device."""


def start_server() -> subprocess.Popen[str]:
    """A process that runs pages on 8 virtual CPU devices; warnings of autopar are errors."""
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", "-c", SERVE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_page(server: subprocess.Popen[str], page: Path, folder: Path) -> list[str]:
    """What each Python block of a page prints if it runs in `folder`."""
    assert server.stdin is not None
    assert server.stdout is not None
    cells = [(block.line, block.text) for block, _ in printed_below(page)]
    environment = {"COORDINATOR": f"localhost:{_free_port()}"}
    server.stdin.write(json.dumps([name_of(page), cells, str(folder), environment]) + "\n")
    server.stdin.flush()
    ended = server.stdout.readline().strip()
    assert ended == "0", f"{name_of(page)} ends with {ended}: {(folder / 'errors.txt').read_text()[-3000:]}"
    printed: list[str] = json.loads((folder / "printed.json").read_text(encoding="utf-8"))
    return printed


def _free_port() -> int:
    """A port for the page about several processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def matches(shown: str, printed: str) -> bool:
    """Whether a block shows what was printed; `...` stands for anything, blanks at the end of lines for nothing."""
    kept, actual = (re.sub(r"[ \t]+$", "", text.strip("\n"), flags=re.MULTILINE) for text in (shown, printed))
    return re.fullmatch(".*".join(map(re.escape, kept.split("..."))), actual, re.DOTALL) is not None


def packages_of(page: Path) -> list[str]:
    """The packages beside autopar's own that a page's blocks import."""
    first_lines = (block.text.partition("\n")[0] for block in blocks(page) if block.tag == "python")
    needed = (line.removeprefix(NEEDS_PACKAGES) for line in first_lines if line.startswith(NEEDS_PACKAGES))
    return [name.strip() for names in needed for name in names.split(",")]


def shell_lines(page: Path) -> Iterator[str]:
    """The commands in a page's `sh` and `console` blocks, without prompt and comment."""
    for block in blocks(page):
        if block.tag in ("sh", "console"):
            text = block.text.replace("\\\n", " ")
            for line in text.splitlines():
                if block.tag == "sh" or line.startswith("$ "):
                    yield line.removeprefix("$ ").partition(" #")[0].strip()
