"""A file is written whole or not at all."""

import os
import re
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest

from autopar import ArgumentError, AutoparWarning
from autopar.files import loss_log
from autopar.files.loss_log import LossLog
from autopar.files.whole_file import check_writable, save, write_whole
from tests.commands.command_line import SMALL, run
from tests.unwritable import unwritable

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs/examples/runs.csv"


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_file_has_its_content_and_the_rights_that_any_new_file_has(tmp_path):
    write_whole(tmp_path / "file", b"one")
    write_whole(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    (tmp_path / "usual").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "usual")}
    assert len(modes) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "usual"]


@pytest.mark.parametrize("step", ["replace", "write"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(step, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    if step == "replace":
        monkeypatch.setattr(os, "replace", full)
    else:
        monkeypatch.setattr("pathlib.Path.open", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", b"new")
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_stays_a_link_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"through")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"through"
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_whole(tmp_path / "pipe", b"sent")
    reader.join()
    assert read == [b"sent"]


def write_plan(file):
    return run("plan", "mlp", *SMALL, "--devices", "2", "-o", file)


def write_rows(file):
    return run("simulate", "--table", ROWS, "--closed-form", "--csv", file)


@pytest.mark.fault(21)
@pytest.mark.parametrize("write", [write_plan, write_rows])
def test_a_full_disk_leaves_the_file_that_was_there_and_says_what_to_do(write, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("a good file")
    monkeypatch.setattr(os, "replace", full)
    assert write(file) == 2
    assert capsys.readouterr().err == (
        f"autopar: cannot write {file}: No space left on device; the file that was there is as it was. "
        "Make room there, or name a file elsewhere\n"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "a good file")]


@pytest.mark.fault(21)
def test_a_folder_that_is_read_only_keeps_its_file_and_is_named(capsys):
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "plan.json"
        file.write_text("a good file")
        with unwritable(Path(name)):
            assert write_plan(file) == 2
        assert capsys.readouterr().err == (
            f"autopar: cannot write {file}: Permission denied; the file that was there is as it was. "
            "Name a file elsewhere\n"
        )
        with unwritable(Path(name)), pytest.raises(ArgumentError, match="Permission denied"):
            save(Path(name) / "another", "text")
        assert [(path.name, path.read_text()) for path in Path(name).iterdir()] == [("plan.json", "a good file")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nosuch/page.html", r"there is no folder nosuch\. Make it, or name a file elsewhere"),
        (".", r"cannot write \.: it is a folder\. Name a file in it"),
        ("/proc/page.html", r"no file can be made in /proc\. Name a file elsewhere"),
    ],
)
def test_where_no_file_can_be_the_advice_fits_and_a_look_ahead_says_the_same(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (check_writable, lambda path: save(path, "text")):
        with pytest.raises(ArgumentError, match=words):
            write(Path(name))
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_autopar_writes_to_a_file_in_another_way():
    """Whoever opens a file to write would leave half of it on a full disk. Files of the system and pipes are no user's.

    Lines that are added to a file are written by line_log.py, each whole or not at all. What a process prints goes to its file as
    it comes.
    """
    folders = [ROOT / name for name in ("autopar", "cost_model", "models", "runtime", "benchmarks")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    found = {
        path.name
        for path in sources
        if re.search(r"write_text|write_bytes|os\.write|open\([^)]*[\"'][wax]b?\+?[\"']", path.read_text())
    }
    of_processes = {"jobs.py", "line.py", "planning_ordinary.py"}
    assert found - of_processes == {"whole_file.py", "loss_log.py", "line_log.py"}


# --- the losses of a run ----------------------------------------------------------------------------------------------

TEXT = "step,loss,seconds\r\n1,0.5,0.250000\r\n2,0.25,0.250000\r\n"


def test_losses_are_in_the_file_when_the_run_ends_and_each_second_before(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log, file = LossLog(tmp_path / "log.csv"), tmp_path / "log.csv"
    log.add(1, 0.5, 0.25)
    assert file.read_bytes() == b"step,loss,seconds\r\n"
    clock[0] = 1.5
    log.add(2, 0.25, 0.25)
    assert file.read_bytes() == TEXT.encode()
    log.add(3, 0.125, 0.25)
    log.close()
    assert file.read_bytes() == f"{TEXT}3,0.125,0.250000\r\n".encode()


@pytest.mark.fault(21)
def test_a_full_disk_does_not_end_the_run_whose_losses_are_written_once_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_log, "PAUSE_S", 0.0)
    log, file = LossLog(tmp_path / "log.csv"), tmp_path / "log.csv"
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(AutoparWarning, match=r"No space left on device.* The run goes on"):
        log.add(1, 0.5, 0.25)
    log.add(2, 0.25, 0.25)  # a second warning would be an error here
    assert file.read_bytes() == b"step,loss,seconds\r\n"
    monkeypatch.undo()
    log.close()
    assert file.read_bytes() == TEXT.encode()


@pytest.mark.filterwarnings("default")
def test_training_ends_well_if_the_disk_is_full_meanwhile(tmp_path, monkeypatch, capsys):
    log, begun, replace = tmp_path / "log.csv", [], os.replace

    def replace_once(part, target):
        if target == log:
            begun.append(full() if begun else target)
        replace(part, target)

    monkeypatch.setattr(os, "replace", replace_once)
    assert run("train", "mlp", *SMALL, "--devices", "1", "--steps", "2", "--log", log) == 0
    assert "No space left on device; the file that was there is as it was" in capsys.readouterr().err
    assert log.read_bytes() == b"step,loss,seconds\r\n"


def test_a_log_that_cannot_be_begun_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"cannot write .*: Not a directory\. Name a file elsewhere"):
        LossLog(tmp_path / "file" / "log.csv")


def test_losses_go_to_a_pipe_row_by_row(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    log = LossLog(tmp_path / "pipe")
    log.add(1, 0.5, 0.25)
    log.add(2, 0.25, 0.25)
    log.close()
    reader.join()
    assert read == [TEXT.encode()]
