"""`calibrate --json`: the cluster file that was written, and how well it explains what was measured."""

import json

from autopar.commands.machine import calibrate
from autopar.cost_model.calibration.fit_cluster import Calibrated
from autopar.cost_model.cluster_files import cluster_text
from autopar.cost_model.hardware import find_cluster
from autopar.files.whole_file import save
from tests.commands.documents import document


def test_the_document_holds_the_file_and_the_errors(tmp_path, capsys, monkeypatch):
    file = tmp_path / "here.json"
    cluster = find_cluster("cpu")

    def measured(path, *, seconds, console, count):
        console.print("what is measured is told elsewhere")
        save(path, cluster_text(cluster, about="a preset", sources={}))
        return Calibrated(cluster, {"dispatch": 0.125})

    monkeypatch.setattr(calibrate, "calibrate_to_file", measured)
    found = document(capsys, "calibrate", "-o", file, "--seconds", "1", "--devices", "2")
    assert found == {"file": str(file), "errors": {"dispatch": 0.125}, "cluster": json.loads(file.read_text())}
    assert find_cluster(str(file)).fingerprint() == cluster.fingerprint()
