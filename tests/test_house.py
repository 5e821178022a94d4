"""The house stays one that a newcomer can live in: limits of folders, files, functions and names, and floors without circles.

The layers themselves are import-linter's (`make contracts`); here are the figures that it does not know.
"""

import ast
import collections
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("autopar", "cost_model", "models", "runtime")
FLOORS, FILES, LINES, MEDIAN_LINES, FUNCTION_LINES, ANYS, FIELDS = 14, 20, 400, 170, 50, 150, 4
LONG_SIGNATURES = {"parallelize"}
"""Its arguments, and their list in the docstring, are longer than any function should be."""


def own_files() -> list[Path]:
    """Every module once: the committed links in `autopar/` are not followed."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if not has_link(path))


def has_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path in own_files() for node in ast.walk(tree_of(path)) if isinstance(node, kinds))


def test_no_folder_has_too_many_files():
    count = collections.Counter(path.parent for path in own_files())
    assert {str(folder): n for folder, n in count.items() if n > FILES} == {}


def test_files_can_be_read_at_one_sitting():
    around = (path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (*own_files(), *around)}
    assert {str(path): n for path, n in lines.items() if n > LINES} == {}
    assert statistics.median(lines[path] for path in own_files()) < MEDIAN_LINES


def test_functions_are_short():
    long = {
        f"{path}:{node.name}": node.end_lineno - node.lineno + 1
        for path, node in nodes(ast.FunctionDef)
        if node.end_lineno - node.lineno >= FUNCTION_LINES and node.name not in LONG_SIGNATURES
    }
    assert long == {}


def test_a_class_name_stands_once_in_a_folder():
    names = collections.defaultdict(list)
    for path, node in nodes(ast.ClassDef):
        names[path.parent, node.name].append(path.name)
    assert {name: files for (_, name), files in names.items() if len(files) > 1} == {}


def test_few_annotations_say_any():
    count = collections.Counter(str(path) for path, node in nodes(ast.Name) if node.id == "Any")
    assert count.total() <= ANYS, count.most_common(20)


def field_names(node: ast.ClassDef) -> list[str]:
    annotated = (x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name))
    return [x.target.id for x in annotated if not re.search("ClassVar|KW_ONLY", ast.unparse(x.annotation))]


def test_dataclasses_of_many_fields_are_made_by_keyword():
    classes = {node.name: node for _, node in nodes(ast.ClassDef)}

    def all_fields(node: ast.ClassDef) -> list[str]:
        """Its own, after those of the bases that are written in this tree."""
        bases = [classes[name] for base in node.bases if (name := ast.unparse(base).partition("[")[0]) in classes]
        return [*(name for base in bases for name in all_fields(base)), *field_names(node)]

    by_position = {
        f"{path}:{node.name}": all_fields(node)
        for path, node in nodes(ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator.partition("(")[0].split(".")[-1] == "dataclass" and "kw_only=True" not in decorator
    }
    assert {name: fields for name, fields in by_position.items() if len(fields) > FIELDS} == {}


def test_every_module_says_what_it_is():
    assert [str(path) for path in own_files() if not ast.get_docstring(tree_of(path))] == []


def imports() -> Iterator[tuple[str, str]]:
    """(module, imported module) within autopar, by import names."""
    names = {module_name(path): path for path in own_files()}
    for name, path in names.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopar"):
                for alias in node.names:
                    longer = f"{node.module}.{alias.name}"
                    yield name, longer if longer in names else str(node.module)
            elif isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names if alias.name in names)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(parts if parts[0] == "autopar" else ("autopar", *parts))
    return dotted.removesuffix(".__init__")


def room_of(module: str) -> str:
    """Its folder; a file at the root of autopar is a room of its own."""
    parts = module.split(".")
    is_folder = (ROOT / "/".join(parts)).is_dir()
    return module if is_folder or len(parts) == 2 else ".".join(parts[:-1])


def test_rooms_form_floors_without_a_circle():
    rooms = nx.DiGraph(
        (room_of(a), room_of(b)) for a, b in imports() if "autopar" not in (a, b) and room_of(a) != room_of(b)
    )
    assert list(nx.simple_cycles(rooms)) == []
    assert nx.dag_longest_path_length(rooms) + 1 <= FLOORS, nx.dag_longest_path(rooms)
