"""A notebook of docs/notebooks run from top to bottom, and the same as a page in Markdown.

In: a notebook as JSON, whose cells are prose or Python. Out: the notebook with what its cells print and show, and the page:
prose as it is, code as blocks that `tests/test_docs.py` runs, text below the block that prints it. An HTML output, the report of
a plan, is a file beside the page, in a frame. What can go wrong: a cell that raises; the error is that of the cell.
"""

from __future__ import annotations

import ast
import contextlib
import html
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ABOUT = "*The notebook of this page is `{path}`.*"
STYLE = "width: 100%; height: 44rem; border: 1px solid #8886"
FRAME = f'<iframe src="../{{file}}" title="{{title}}" loading="lazy" style="{STYLE}"></iframe>'


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its code: what it prints, and the last expression's HTML or text."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = {**cell, "execution_count": count, "outputs": _outputs("".join(cell["source"]), names, count)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        page = value._repr_html_() if hasattr(value, "_repr_html_") else None
        data |= {"text/html": page.splitlines(keepends=True)} if page else {}
        outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def pages(path: Path, notebook: dict[str, Any]) -> dict[Path, str]:
    """The Markdown page of an executed notebook, and a file for each HTML output, by path."""
    parts, files = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append("```text\n" + "".join(output["text"]).rstrip("\n") + "\n```")
            elif "text/html" in output["data"]:
                file = path.with_name(f"{path.stem}_{cell['execution_count']}.html")
                files[file] = _unframed("".join(output["data"]["text/html"]))
                parts.append(FRAME.format(file=file.name, title=html.escape("".join(output["data"]["text/plain"]))))
            else:
                parts.append("shows\n\n```text\n" + "".join(output["data"]["text/plain"]).rstrip("\n") + "\n```")
    parts.insert(1, ABOUT.format(path=f"docs/notebooks/{path.name}"))
    return {path.with_suffix(".md"): "\n\n".join(parts) + "\n", **files}


def _unframed(output: str) -> str:
    """The page that an output holds in a frame of its own, as the attribute `srcdoc`."""
    framed = re.search(r'srcdoc="([^"]*)"', output)
    return html.unescape(framed[1]) if framed else output


def main() -> None:
    """Run the notebook on standard input and write it, with its outputs, to standard output."""
    json.dump(execute(json.load(sys.stdin)), sys.stdout, indent=1, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
