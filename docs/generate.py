"""Write what the pages show of the command line, docs/output/*.txt, a plan's picture, docs/images/plan.svg, docs/coverage.md, and
the outputs of the notebooks in docs/notebooks, with their pages.

    python docs/generate.py              # all of it, two minutes
    python docs/generate.py help plan    # these files alone, by their names without folder and ending
    python docs/generate.py --check      # exit status 1 if a file differs from what the commands print today

In: the commands below. Out: exactly what they print, of reports on pages of docs/concepts some parts; `--check` ignores how long
planning took, which differs from run to run. The picture holds its text as text and refers to no other host.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from docs.notebook import pages

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
NEEDED = {"simulate_plan": "plan_mlp"}
"""The command whose file another one reads."""
GPT = "--layers 2 --hidden 512 --heads 8 --seq 256 --batch 64 --dropout 0"
A100 = "--cluster dgx-a100-80gb --devices 8 --mesh 8"
BY_EXPERT = " ".join(f'--constraint "state/params/*/moe/{name}=x,-,-"' for name in ("up", "down"))
CONCEPTS = {
    "collectives": "autopar collectives --cluster dgx-h100 --mesh 2,8 --bytes 1KiB,64MiB",
    "data_parallel": f"autopar plan gpt {GPT} {A100} --data-parallel",
    "expert_parallel": f'autopar plan moe {GPT} {A100} --constraint "batch/*=x,-" {BY_EXPERT}',
    "pipeline_parallel": "autopar plan gpt --layers 4 --hidden 512 --heads 8 --seq 256 --batch 32 --dropout 0 "
    "--cluster p3.16xlarge --devices 8 --stages 4 --mesh 2 --microbatches 8 --schedule 1f1b",
    "rank": f"autopar rank gpt {GPT} --stages 1 --clusters p3.16xlarge,p4d.24xlarge,dgx-h100 --devices 8",
    "sequence_parallel": "autopar plan llama --layers 2 --hidden 512 --heads 8 --seq 8192 --batch 1 --fused-attention "
    f'{A100} --constraint "batch/*=-,x" --collectives collective-permute,all-reduce',
    "tensor_parallel": f"autopar plan gpt --layers 2 --hidden 1024 --heads 16 --seq 256 --batch 4 --dropout 0 {A100} "
    '--constraint "batch/*=replicated" --collectives all-reduce',
    "zero3": f"autopar plan gpt {GPT} {A100} --zero 3",
}
"""The commands of docs/concepts; of a plan's report docs/output/NAME.txt has the parts that `SHOWN` names."""
EXAMPLES = ("when",)
"""Programs of docs/examples whose output is shown."""
SHOWN = ("Time of the step", "Collectives per step", "Stages", "Transfers", "Schedule")
MOST_ROWS = 8
PICTURE = (
    "autopar plan gpt --layers 4 --hidden 1024 --heads 16 --seq 512 --batch 32 --dropout 0 "
    "--devices 8 --cluster p3.16xlarge --stages 2 --microbatches 4"
)
PICTURE_COLUMNS = 118
TEXT_COLUMNS = 124
HELP_COLUMNS = 90

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
COVERAGE = "import docs.coverage; print(docs.coverage.page(), end='')"

FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Rich's SVG asks another host for its font; without that, viewers take their own monospaced one."""
SECONDS_OF_PLANNING = re.compile(r"<text[^>]*>planned&#160;in[^<]*</text>|planned in [\d.,]+ \w+")


def run(command: str, folder: Path, **environment: str) -> str:
    """What a command prints."""
    program, *arguments = shlex.split(command)
    assert program == "autopar", command
    settings = {**os.environ, "AUTOPAR_CACHE": "off", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder), **environment}
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
    return done.stdout


def text_of(command: str, folder: Path) -> str:
    """A command's output, as wide as the pages; of a report on pages of docs/concepts some parts."""
    columns = HELP_COLUMNS if "--help" in command else TEXT_COLUMNS
    text = "\n".join(line.rstrip() for line in run(command, folder, COLUMNS=str(columns)).splitlines()) + "\n"
    return excerpt(text) if command.startswith("autopar plan") and command in CONCEPTS.values() else text


def excerpt(report: str) -> str:
    """The head of a report and the parts that `SHOWN` names, each cut after so many lines; `...` stands for what is left out."""
    head, *parts = report.rstrip("\n").split("\n\n")
    shown = [head]
    for part in parts:
        title, *lines = part.splitlines()
        if title.startswith(SHOWN):
            shown.append("\n".join([title, *lines[:MOST_ROWS], *["..."][: len(lines) > MOST_ROWS]]))
    return "\n\n".join(shown) + "\n"


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


def python(*arguments: str, given: str = "") -> str:
    """What a process of its own prints, for JAX is of no use to the rest."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "AUTOPAR_CACHE": "off", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{arguments[-1]}: {done.stderr}")
    return done.stdout


def notebook(path: Path) -> dict[Path, str]:
    """A notebook with its outputs, and its page."""
    executed = python(str(DOCS / "notebook.py"), given=path.read_text(encoding="utf-8"))
    return {path: executed, **pages(path, json.loads(executed))}


def example(name: str) -> str:
    """What a program of docs/examples prints."""
    shown = python(str(DOCS / "examples" / f"{name}.py"))
    return "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"


def makers(folder: Path) -> dict[str, Callable[[], dict[Path, str]]]:
    """What makes each generated file, by the file's name without folder and ending; a notebook is made with its pages."""

    def output(name: str, text: Callable[[], str]) -> Callable[[], dict[Path, str]]:
        return lambda: {DOCS / "output" / f"{name}.txt": text()}

    return {
        **{name: output(name, partial(text_of, command, folder)) for name, command in COMMANDS.items()},
        **{name: output(name, partial(text_of, command, folder)) for name, command in CONCEPTS.items()},
        **{name: output(name, partial(example, name)) for name in EXAMPLES},
        **{path.stem: partial(notebook, path) for path in NOTEBOOKS},
        "plan": lambda: {DOCS / "images" / "plan.svg": picture(folder)},
        "coverage": lambda: {DOCS / "coverage.md": python("-c", COVERAGE)},
    }


def files(names: Sequence[str] = ()) -> dict[Path, str]:
    """The generated files of these names with their text; of none all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(DOCS / "examples" / "runs.csv", folder)
        (folder / "autopar").symlink_to(ROOT / "autopar")  # so that paths of files are relative, and lines break alike
        known = makers(folder)
        if unknown := sorted({*names} - {*known}):
            raise SystemExit(f"no generated file is called {', '.join(unknown)}; there are {', '.join(known)}")
        wanted = {*names, *(NEEDED[name] for name in names if name in NEEDED)} if names else {*known}
        made = [make() for name, make in known.items() if name in wanted]
        return {path: text for texts in made for path, text in texts.items()}


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a file by its name without folder and ending; default: all"
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    check = arguments.check
    stale = []
    for path, text in files(arguments.names).items():
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if SECONDS_OF_PLANNING.sub("", text) != SECONDS_OF_PLANNING.sub("", there):
            stale.append(path.relative_to(ROOT))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    for path in (
        () if check else NOTEBOOKS
    ):  # a page that only the seconds of planning tell from its notebook is not stale
        for page, text in pages(path, json.loads(path.read_text(encoding="utf-8"))).items():
            page.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'differs' if check else 'written'}: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
