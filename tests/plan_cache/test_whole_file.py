"""A file is written whole or not at all."""

import os
import stat
import threading

import pytest

from autopar.plan_cache.whole_file import write_whole
from tests.commands.command_line import SMALL, run


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
    def full(*_):
        raise OSError(28, "No space left on device")

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


def test_a_plan_that_cannot_be_written_leaves_the_plan_that_was_there(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = tmp_path / "plan.json"
    file.write_text("a good plan")
    monkeypatch.setattr(os, "replace", full)
    assert run("plan", "mlp", *SMALL, "--devices", "2", "-o", file) == 2
    assert capsys.readouterr().err == f"autopar: cannot write {file}: No space left on device\n"
    assert file.read_text() == "a good plan"
