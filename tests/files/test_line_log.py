"""Lines are added whole or not at all, and a full disk ends no run."""

from pathlib import Path

import pytest

from autopar.errors import ArgumentError, AutoparWarning
from autopar.files.line_log import LineLog
from autopar.testing.faults import no_room


def test_lines_are_added_to_those_that_are_there(tmp_path):
    path = tmp_path / "lines"
    for _ in range(2):
        log = LineLog(path)
        log.add("one")
        log.add("two")
        log.close()
    assert path.read_text() == "one\ntwo\n" * 2


@pytest.mark.fault(21)
def test_half_a_line_is_cut_off_and_told_once_and_later_lines_follow(tmp_path):
    path = tmp_path / "lines"
    log = LineLog(path)
    with no_room(10):
        log.add("1234567")
        with pytest.warns(
            AutoparWarning, match="No space left on device. The run goes on, and tries to write its next line"
        ):
            log.add("abcdefg")
        assert path.read_text() == "1234567\n"
        log.add("abcdefg")
    log.add("later")
    log.close()
    assert path.read_text() == "1234567\nlater\n"


def test_a_full_disk_is_told_and_a_path_that_cannot_be_opened_refused(tmp_path):
    log = LineLog(Path("/dev/full"))
    with pytest.warns(AutoparWarning, match="cannot write /dev/full: No space left on device"):
        log.add("one")
    log.close()
    with pytest.raises(ArgumentError, match=r"No such file or directory\. Name a file elsewhere"):
        LineLog(tmp_path / "nowhere" / "lines")
