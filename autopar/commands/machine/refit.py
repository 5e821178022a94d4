"""`calibrate --from RUN...`: a cluster file refitted from recorded runs, without measuring anything anew.

In: files that `run.save` or `train --timeline` wrote. Out: a cluster file, and sentences on what was fitted and what stayed. What
can go wrong: runs that were planned for unlike clusters; the error names them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from autopar.cost_model.cluster_files import cluster_from_json, cluster_text
from autopar.cost_model.machine import Cluster
from autopar.errors import ArgumentError
from autopar.files.whole_file import save
from autopar.recording.recorded import Recorded
from autopar.recording.refit import Refitted, refit
from autopar.recording.trace_file import read_run


def refit_to_file(path: Path, files: Sequence[Path], console: Console) -> Refitted:
    """Refit a cluster from recordings, write its file, and say what was found. Raises ArgumentError for what cannot be used."""
    runs = [read_run(file) for file in files]
    found = refit(_cluster_of(runs, files), runs)
    about = f"Devices {runs[0].device_kind!r}, refitted from {len(runs)} recorded runs by `autopar calibrate --from`"
    fitted = "; ".join(found.fitted) or "nothing could be fitted"
    save(path, cluster_text(found.cluster, about=about, sources={"device": fitted, "tiers": fitted}))
    for words in found.fitted:
        console.print(f"fitted: {words}", markup=False, highlight=False)
    for words in found.kept:
        console.print(f"as it was: {words}", markup=False, highlight=False)
    console.print(f"wrote {path}", markup=False, highlight=False)
    return found


def _cluster_of(runs: Sequence[Recorded], files: Sequence[Path]) -> Cluster:
    """The cluster that all runs were planned for. Raises ArgumentError if they differ, or hold none."""
    texts = {run.cluster_text for run in runs}
    if "" in texts:
        missing = next(file for file, run in zip(files, runs, strict=True) if not run.cluster_text)
        raise ArgumentError(
            f"{missing} does not hold its cluster: record the step that parallelize made, not the compiled one"
        )
    if len(texts) > 1:
        names = sorted({json.loads(text)["name"] for text in texts})
        raise ArgumentError(f"the recordings were planned for unlike clusters ({', '.join(names)}): refit each alone")
    return cluster_from_json(json.loads(texts.pop()), origin=str(files[0]))
