"""What a primitive is, and what its parameters mean, is known to the tables and to `program/` alone: checked in the source.

Elsewhere a primitive's name may be shown to users, and an equation may be asked whether it is one of the marks that `program/`
itself puts into programs, such as `fan_out_p`. Everything else is a missing column of a table.
"""

import ast
import textwrap
from pathlib import Path

import pytest

import autopar

PACKAGE = Path(autopar.__file__).parent
TABLES = ("rules/", "program/", "compat.py", "intra_op/xla_cpu/")
USER_CODE = ("models/",)
"""Steps as users write them, whose `params` are weights."""


def violations(source):
    """(line, what is wrong) wherever the source looks at a primitive or at parameters."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    marks = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopar.program.")
        for alias in node.names
        if alias.name.endswith("_p")
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr == "params":
            yield node.lineno, "reads parameters"
        if node.attr == "primitive" and not is_harmless(node, parents, marks):
            yield node.lineno, "looks at a primitive"


def is_harmless(node, parents, marks):
    """Whether a primitive is only compared with a mark or with another equation's, or its name only shown."""
    parent = parents[node]
    if isinstance(parent, ast.Compare):
        sides = [parent.left, *parent.comparators]
        return all(
            (isinstance(side, ast.Name) and side.id in marks)
            or (isinstance(side, ast.Attribute) and side.attr == "primitive")
            for side in sides
        )
    if not isinstance(parent, ast.Attribute) or parent.attr != "name":
        return False
    shown = parents[parent]
    is_argument = isinstance(shown, ast.Call) and isinstance(shown.func, ast.Name) and parent in shown.args
    return isinstance(shown, ast.FormattedValue) or is_argument


FILES = [
    path
    for top in sorted(PACKAGE.iterdir())  # links among them, into which a search from above does not go
    for path in (sorted(top.rglob("*.py")) if top.is_dir() else [top])
    if path.suffix == ".py" and not path.relative_to(PACKAGE).as_posix().startswith((*TABLES, *USER_CODE))
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_only_tables_and_program_look_at_primitives_and_parameters(path):
    assert list(violations(path.read_text())) == []


def test_the_folders_that_are_links_are_looked_at_too():
    looked_at = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert {"cost_model", "runtime", "stages", "intra_op", "microbatches", "simulate"} <= looked_at


@pytest.mark.parametrize(
    "line",
    [
        'eqn.primitive.name == "dot_general"',
        'eqn.primitive.name in ("add", "sub")',
        "TABLE[eqn.primitive.name]",
        "TABLE.get(eqn.primitive.name)",
        'eqn.primitive.name.startswith("reduce")',
        "name = eqn.primitive.name",
        "eqn.primitive is lax.dot_general_p",
        "eqn.primitive is other_p",
        "eqn.primitive in (fan_out_p, other_p)",
        "TABLE[eqn.primitive]",
        'eqn.params["axes"]',
        'eqn.params.get("axes")',
        "list(eqn.params.items())",
    ],
)
def test_what_looks_at_a_primitive_is_found(line):
    assert list(violations(f"from autopar.program.program import fan_out_p\n{line}"))


def test_showing_a_name_and_asking_for_a_mark_are_no_violations():
    source = """
        from autopar.program.program import fan_out_p
        label = f"{eqn.primitive.name} {eqn.outvars}"
        error = MixedExamples(eqn.primitive.name, "mixes")
        copies = eqn.primitive is fan_out_p or eqn.primitive is not fan_out_p
        same = eqn.primitive is other.primitive
    """
    assert list(violations(textwrap.dedent(source))) == []
