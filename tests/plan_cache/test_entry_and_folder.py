"""The files of the plan cache: whole or not there, read with care, bounded in size, shared by processes."""

import dataclasses
import gzip
import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from autopar.errors import AutoparWarning, PlanError
from autopar.plan_cache import folder as folders
from autopar.plan_cache.entry import Entry, pack, unpack
from autopar.plan_cache.folder import CacheFolder, cache_folder

ENTRY = Entry(
    key="a" * 64,
    subject="a step",
    plan="{}",
    sources=("m.py:1 (f)",),
    warnings=("slow",),
    phases=None,
    searched_s=None,
)


def entry(letter: str, **changes) -> Entry:
    return dataclasses.replace(ENTRY, key=letter * 64, **changes)


@pytest.fixture
def folder(tmp_path) -> CacheFolder:
    return CacheFolder(tmp_path / "kept" / "here")


# --- entries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("searched_s", [None, 12.5])
def test_an_entry_is_the_same_after_writing_and_reading(searched_s):
    one = entry("a", searched_s=searched_s)
    assert unpack(pack(one), one.key) == one
    assert pack(one) == pack(one)


def test_no_change_of_a_byte_and_no_missing_end_is_taken_for_an_entry():
    packed = pack(ENTRY)
    changed = [packed[:i] + bytes([packed[i] ^ 0x5A]) + packed[i + 1 :] for i in range(len(packed))]
    cut = [packed[:i] for i in range(len(packed))]
    for damaged in (*changed, *cut):
        try:
            read = unpack(damaged, ENTRY.key)
        except PlanError:
            continue
        assert read == ENTRY, "only what gzip's header says of time and system may differ"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 0}, "version is 0; 2 is expected"),
        ({"key": "b" * 64}, "the entry of another question, bbbbbbbbbbbb"),
        ({"searched_s": "long"}, 'searched_s is "long"; a number or null is expected'),
        ({"sources": None}, "sources is null; a list is expected"),
        ({"more": 1}, 'unknown "more"'),
    ],
)
def test_an_entry_of_another_version_question_or_form_is_refused_in_words(fields, words):
    text = json.dumps(dataclasses.asdict(ENTRY) | fields)
    with pytest.raises(PlanError, match=words):
        unpack(gzip.compress(text.encode()), ENTRY.key)


def test_a_plan_serves_every_search_that_would_find_nothing_better():
    complete, early = ENTRY, entry("a", searched_s=10.0)
    assert all(complete.serves(limit) for limit in (0.1, 60.0, None))
    assert [early.serves(limit) for limit in (1.0, 10.0, 10.1, None)] == [True, True, False, False]


def test_what_two_searches_had_counts_once_nothing_better_was_found():
    seconds = {(None, 3.0): None, (3.0, None): None, (3.0, 5.0): 5.0, (5.0, 3.0): 5.0, (None, None): None}
    assert {pair: entry("a", searched_s=pair[0]).add_search(pair[1]).searched_s for pair in seconds} == seconds


# --- files ------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_found_and_nothing_else(folder, caplog):
    assert folder.find("a" * 64) is None
    folder.keep(ENTRY)
    assert folder.find(ENTRY.key) == ENTRY
    assert folder.find("b" * 64) is None
    newer = entry("a", subject="a newer plan")
    folder.keep(newer)
    assert folder.find(ENTRY.key) == newer
    assert [file.key for file in folder.files()] == [ENTRY.key]
    assert stat.S_IMODE(folder.path.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize(  # named: what gzip writes holds the time, and every worker of pytest has to name a test alike
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not gzip", id="not gzip"),
        pytest.param(gzip.compress(b"{"), id="cut off"),
        pytest.param(gzip.compress(b"[]"), id="a list"),
        pytest.param(gzip.compress(b"9" * 5000), id="a number too long"),
        pytest.param(gzip.compress(b"[" * 100_000), id="too deep"),
        pytest.param(pack(entry("b")), id="another question"),
    ],
)
def test_a_file_that_is_no_entry_is_a_miss_with_a_line_in_the_log_and_is_written_anew(folder, content, caplog):
    folder.keep(ENTRY)
    folder.files()[0].path.write_bytes(content)
    with caplog.at_level("INFO", logger="autopar"):
        assert folder.find(ENTRY.key) is None
    assert "the plan in the cache for aaaaaaaaaaaa cannot be used" in caplog.text
    folder.keep(ENTRY)
    assert folder.find(ENTRY.key) == ENTRY


def test_a_folder_in_the_place_of_a_file_is_a_miss(folder):
    (folder.path / f"{ENTRY.key}.plan").mkdir(parents=True)
    assert folder.find(ENTRY.key) is None


def test_what_was_not_used_for_the_longest_time_makes_room(folder):
    size = len(pack(ENTRY))
    bounded = dataclasses.replace(folder, limit_bytes=3 * size + 20)
    for age, letter in enumerate("abc"):
        bounded.keep(entry(letter))
        os.utime(bounded.path / f"{letter * 64}.plan", (1000 + age, 1000 + age))
    assert bounded.find("a" * 64) is not None, "reading marks it as used"
    bounded.keep(entry("d"))
    assert sorted(file.key[0] for file in bounded.files()) == ["a", "c", "d"]
    assert sum(file.size_bytes for file in bounded.files()) <= bounded.limit_bytes


def test_files_that_a_dead_process_left_unfinished_are_removed_and_those_of_others_stay(folder):
    folder.keep(ENTRY)
    old, new = folder.path / "old.part", folder.path / "new.part"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    folder.keep(entry("b"))
    assert (old.exists(), new.exists()) == (False, True)
    assert folder.clear() == 2
    assert list(folder.path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing_behind_and_warns_once(folder, monkeypatch):
    def full(*names):
        raise OSError(28, "No space left on device")

    folders._warn_once.cache_clear()
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(AutoparWarning, match=r"plans cannot be kept in .*here \(No space left on device\), so each run"):
        folder.keep(ENTRY)
    folder.keep(entry("b"))  # a second warning would be an error here
    assert list(folder.path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_warning_too(tmp_path):
    (tmp_path / "file").write_text("in the way")
    folders._warn_once.cache_clear()
    with pytest.warns(AutoparWarning, match="plans cannot be kept in .*AUTOPAR_CACHE"):
        CacheFolder(tmp_path / "file" / "kept").keep(ENTRY)
    assert CacheFolder(tmp_path / "file" / "kept").find(ENTRY.key) is None
    assert CacheFolder(tmp_path / "file" / "kept").files() == []


def _write_and_read(path: Path, letters: str) -> int:
    """Write entries over and over, and read those of all; how many were neither whole nor missing."""
    folder, wrong = CacheFolder(path, limit_bytes=4 * len(pack(ENTRY))), 0
    for turn in range(40):
        for letter in letters:
            folder.keep(entry(letter, subject=f"turn {turn}"))
        for letter in "abcdef":
            found = folder.find(letter * 64)
            wrong += found is not None and found != entry(letter, subject=found.subject)
            wrong += found is None and (folder.path / f"{letter * 64}.plan").is_dir()
    return wrong


def test_processes_that_write_and_read_at_once_see_whole_entries_or_none(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(_write_and_read, [(tmp_path, "abcd"), (tmp_path, "cdef")]) == [0, 0]
    assert not list(tmp_path.glob("*.part"))


# --- the environment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"AUTOPAR_CACHE": "off"}, None),
        ({"AUTOPAR_CACHE": " OFF "}, None),
        ({"AUTOPAR_CACHE": "/a/b"}, "/a/b"),
        ({"AUTOPAR_CACHE": "~/plans"}, "/home/me/plans"),
        ({"AUTOPAR_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/autopar"),
        ({"XDG_CACHE_HOME": "relative, which the specification says to ignore"}, "/home/me/.cache/autopar"),
        ({}, "/home/me/.cache/autopar"),
    ],
)
def test_the_folder_is_the_one_of_the_environment(variables, path, monkeypatch):
    for name in ("AUTOPAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    found = cache_folder()
    assert (None if found is None else str(found.path)) == path


def test_without_a_home_there_is_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AUTOPAR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None
