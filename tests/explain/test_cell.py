"""A path in a table is broken after its slashes."""

import pytest
from rich.console import Console
from rich.text import Text

from autopar.explain.cell import Cell

CONSOLE = Console(width=80)


def lines_of(text, width):
    return [str(line).rstrip() for line in Cell(text).wrap(CONSOLE, width)]


def test_a_path_is_broken_between_names_and_a_name_that_is_too_wide_is_folded():
    assert lines_of("state/params/embedding/token", 16) == ["state/params/", "embedding/token"]
    assert lines_of("state/params/embedding/token", 8) == ["state/", "params/", "embeddin", "g/", "token"]


@pytest.mark.parametrize("width", [5, 9, 20, 200])
@pytest.mark.parametrize("text", ["", "1.5 GB", "(16, 2048), a/b", "two words/of three, and 3 more", "/", "a//b"])
def test_text_loses_nothing_and_what_fits_is_as_rich_breaks_it(text, width):
    lines = lines_of(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    if all(len(word) <= width for word in text.split()):
        assert lines == [str(line).rstrip() for line in Text(text).wrap(CONSOLE, width)]
