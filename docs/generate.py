"""Write what the pages show of the command line, docs/output/*.txt, a plan's picture, docs/images/plan.svg, and docs/coverage.md.

    python docs/generate.py            # all of it, half a minute
    python docs/generate.py --check    # exit status 1 if a file differs from what the commands print today

In: the commands below. Out: exactly what they print, but for the folders in front of the example models' files; `--check` ignores
how long planning took, which differs from run to run. The picture holds its text as text and refers to no other host.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

COMMANDS = {
    "plan_mlp": "autopar plan mlp --devices 8 -o plan.json",
    "simulate_plan": "autopar simulate --plan plan.json --cluster dgx-h100",
    "simulate_rows": "autopar simulate --table runs.csv",
    "help": "autopar --help",
    "plan_help": "autopar plan --help",
    "simulate_help": "autopar simulate --help",
    "launch_help": "autopar launch --help",
}
"""The text of docs/output/NAME.txt, in this order, in one folder that holds docs/examples/runs.csv."""
PICTURE = (
    "autopar plan gpt --layers 4 --hidden 1024 --heads 16 --seq 512 --batch 32 --dropout 0 "
    "--devices 8 --cluster p3.16xlarge --stages 2 --microbatches 4"
)
PICTURE_COLUMNS = 118
TEXT_COLUMNS = 124
HELP_COLUMNS = 90

COVERAGE = "import docs.coverage; print(docs.coverage.page(), end='')"

FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Rich's SVG asks another host for its font; without that, viewers take their own monospaced one."""
SECONDS_OF_PLANNING = re.compile(r"<text[^>]*>planned&#160;in[^<]*</text>|planned in [\d.,]+ \w+")


def run(command: str, folder: Path, **environment: str) -> str:
    """What a command prints."""
    program, *arguments = shlex.split(command)
    assert program == "autopar", command
    settings = {**os.environ, "AUTOPAR_CACHE": "off", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "autopar", *arguments],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    return re.sub(r"\S+(?=autopar/models/)", "", done.stdout)


def text_of(command: str, folder: Path) -> str:
    """A command's output, as wide as the pages."""
    columns = HELP_COLUMNS if "--help" in command else TEXT_COLUMNS
    return "\n".join(line.rstrip() for line in run(command, folder, COLUMNS=str(columns)).splitlines()) + "\n"


def picture(folder: Path) -> str:
    """The report of `PICTURE` as SVG."""
    report = run(PICTURE, folder, COLUMNS=str(PICTURE_COLUMNS), FORCE_COLOR="1")
    with tempfile.TemporaryFile("w") as nowhere:
        console = Console(record=True, width=PICTURE_COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text(f"$ {PICTURE}\n"))
        console.print(Text.from_ansi(report.rstrip("\n")), no_wrap=True, overflow="ignore", crop=False)
        svg = console.export_svg(title="autopar plan", unique_id="plan")
    svg = FONT.sub("", svg).replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    return re.sub(r"\s*<!-- Generated with Rich .*?-->", "", svg)


def coverage() -> str:
    """The page of primitives and harnesses, made by a process of its own: JAX is of no use to the rest."""
    done = subprocess.run(
        [sys.executable, "-c", COVERAGE],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"docs/coverage.py: {done.stderr}")
    return done.stdout


def files() -> dict[Path, str]:
    """Every generated file with its text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(DOCS / "examples" / "runs.csv", folder)
        texts = {DOCS / "output" / f"{name}.txt": text_of(command, folder) for name, command in COMMANDS.items()}
        return {**texts, DOCS / "images" / "plan.svg": picture(folder), DOCS / "coverage.md": coverage()}


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = []
    for path, text in files().items():
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if SECONDS_OF_PLANNING.sub("", text) != SECONDS_OF_PLANNING.sub("", there):
            stale.append(path.relative_to(ROOT))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'differs' if check else 'written'}: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
