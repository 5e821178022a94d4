"""Texts in tables are broken at spaces, slashes and commas, and an amount keeps its unit."""

import pytest
from rich.console import Console
from rich.text import Text

from autopar.explain.fitted import Cell

CONSOLE = Console(width=80)


def lines_of(text, width):
    return [str(line).rstrip() for line in Cell(text).wrap(CONSOLE, width)]


def test_a_path_is_broken_between_names_and_a_name_that_is_too_wide_is_folded():
    assert lines_of("state/params/embedding/token", 16) == ["state/params/", "embedding/token"]
    assert lines_of("state/params/embedding/token", 8) == ["state/", "params/", "embeddin", "g/token"]


@pytest.mark.parametrize("width", [5, 9, 20, 200])
@pytest.mark.parametrize("text", ["", "(16, 2048), a/b", "two words/of three, and 3 more", "/", "a//b"])
def test_text_loses_nothing_and_what_fits_is_as_rich_breaks_it(text, width):
    lines = lines_of(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    if all(len(word) <= width for word in text.split()):
        assert lines == [str(line).rstrip() for line in Text(text).wrap(CONSOLE, width)]


def test_shapes_are_broken_at_commas_and_amounts_keep_their_units():
    assert lines_of("float32[128,512]", 12) == ["float32[128,", "512]"]
    assert lines_of("184.8 MiB to 724.4 MiB", 12) == ["184.8 MiB to", "724.4 MiB"]
    assert lines_of("17.1 us to 218 us", 8) == ["17.1 us", "to", "218 us"]
