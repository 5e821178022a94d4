"""Tables fit their terminal: no word is broken, and nothing is left out without a word."""

import io
import re

import pytest
from rich.console import Console

from autopar.explain.tables import collectives_table, new_table
from autopar.plan import CollectivePlan

LEAF = "state/params/block_{0..3}/{attention_norm,ffn_norm}/{bias,scale}"
COLLECTIVES = [
    CollectivePlan(
        kind=kind,
        axes=("x", "y"),
        bytes=131072,
        count=4,
        operand="float32[3,4,32,128]",
        source=f"{folder}/models/gpt.py:26 (attend)",
        predicted_s=1e-4,
        scope=scope,
    )
    for kind, folder, scope in (
        ("all-reduce", "/home/somebody/a/long/way", "block_0/attention/qkv"),
        ("collective-permute", "/home/somebody/a/longer/way", "block_0/attention/out"),
    )
]


def printed(table, width):
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(table)
    return stream.getvalue()


def words_of(table):
    cells = [str(text) for column in table.columns for text in (column.header, *column.cells)]
    return {piece for cell in cells for piece in re.findall(r"[^\s/,-]+", cell)}


def leaves():
    table = new_table("Leaves", "leaf", "shape", "per device", numbers=("per device",), aside=("leaf",))
    for leaf, size in ((LEAF, "512.0 KiB"), ("state/step", "4 B")):
        table.add_row(leaf, "(128, 3, 4, 32)", size)
    return table


@pytest.mark.parametrize("width", [44, 60, 80, 100])
@pytest.mark.parametrize(
    "table", [leaves(), collectives_table("Collectives", COLLECTIVES)], ids=["leaves", "collectives"]
)
def test_a_table_fits_and_breaks_no_word(table, width):
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    left_out = "".join(text.partition("(not shown in")[1:])
    assert {word for word in words_of(table) if word not in text} == set() or left_out


def test_a_path_that_is_too_long_has_a_line_of_its_own():
    lines = printed(leaves(), 70).splitlines()
    row = lines.index(LEAF)
    assert lines[row + 1].split() == ["(128,", "3,", "4,", "32)", "512.0", "KiB"]
    assert lines[row + 2].split()[0] == "state/step", "one that is short stands beside its figures"


def test_a_line_of_source_elsewhere_is_told_by_its_file_below_the_row():
    lines = printed(collectives_table("Collectives", COLLECTIVES[:1]), 70).splitlines()
    assert "  float32[3,4,32,128]  block_0/attention/qkv, gpt.py:26" in lines
    assert [line for line in lines if "/home" in line] == []


def test_columns_that_are_left_out_are_named():
    text = printed(collectives_table("Collectives", COLLECTIVES), 64)
    assert "(not shown in 64 columns: bytes in all)" in text
