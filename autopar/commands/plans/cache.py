"""`cache`: list the plans that are kept on disk, remove them, or print where they are."""

from __future__ import annotations

import argparse
import sys
import time

from autopar.commands.terminal.printing import new_table, print_json
from autopar.errors import ArgumentError, PlanError
from autopar.explain import bytes_text, seconds_text, standard_output
from autopar.plan_cache.entry import unpack
from autopar.plan_cache.folder import OFF, VARIABLE, CacheFolder, StoredFile, cache_folder


def cache(options: argparse.Namespace) -> int:
    """Run the command; ArgumentError if there is no cache."""
    folder = cache_folder()
    if folder is None:
        raise ArgumentError(f"there is no plan cache: {VARIABLE} is {OFF!r}, or this user has no home folder")
    match options.action:
        case "list" if options.json:
            print_json(_document(folder))
        case "list":
            _list(folder)
        case "clear":
            _clear(folder, as_json=options.json)
        case _ if options.json:
            print_json({"folder": str(folder.path)})
        case _:
            sys.stdout.write(f"{folder.path}\n")
    return 0


def _document(folder: CacheFolder) -> dict[str, object]:
    """The plans of a folder as data."""
    plans = []
    for file in folder.files():
        searched, subject = _describe(file)
        plans.append(
            {
                "key": file.key,
                "last_used_s_ago": max(0.0, time.time() - file.used_at),
                "bytes": file.size_bytes,
                "searched": searched,
                "plan": subject,
            }
        )
    return {"folder": str(folder.path), "limit_bytes": folder.limit_bytes, "plans": plans}


def _list(folder: CacheFolder) -> None:
    files = folder.files()
    console = standard_output()
    table = new_table("", "last used", "size", "searched", "plan", words=("searched", "plan"))
    for file in files:
        age_s = max(0.0, time.time() - file.used_at)
        table.add_row(f"{_age_text(age_s)} ago", bytes_text(file.size_bytes), *_describe(file))
    if files:
        console.print(table)
    size = sum(file.size_bytes for file in files)
    console.print(
        f"{len(files)} plans, {bytes_text(size)} of at most {bytes_text(folder.limit_bytes)}, in {folder.path}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _clear(folder: CacheFolder, *, as_json: bool) -> None:
    try:
        count = folder.clear()
    except OSError as error:
        raise ArgumentError(f"cannot remove the plans in {folder.path}: {error.strerror}") from None
    if as_json:
        print_json({"folder": str(folder.path), "removed": count})
    else:
        sys.stdout.write(f"{count} plans removed from {folder.path}\n")


def _describe(file: StoredFile) -> tuple[str, str]:
    """Describe how far the search for a plan went, and the step that the plan is for."""
    try:
        entry = unpack(file.path.read_bytes(), file.key)
    except (OSError, PlanError) as error:
        return "", f"cannot be read: {error}"
    return "all" if entry.searched_s is None else seconds_text(entry.searched_s), entry.subject


def _age_text(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
