"""Cluster files: every preset is whole, sourced and sane; a bad file says where it is wrong."""

import copy
import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopar.cost_model.cluster_files import ClusterFileError, cluster_from_json, cluster_text, load_cluster
from autopar.cost_model.hardware import PRESETS, Cluster, find_cluster, find_preset, preset
from autopar.errors import AutoparWarning
from autopar.settings import choose_cluster

FOLDER = Path(__file__).resolve().parents[2] / "cost_model" / "clusters"
FILES = sorted(FOLDER.glob("*.json"))
GB = 1e9


def fields_of(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def figures_in(value, place=""):
    """Paths of all numbers in a file."""
    if isinstance(value, dict):
        return [p for key, item in value.items() for p in figures_in(item, f"{place}.{key}" if place else key)]
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in figures_in(item, f"{place}.{i}")]
    return [place] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_of_a_preset_has_a_source(path):
    fields = json.loads(path.read_text())
    sources = fields.pop("sources")
    without = [p for p in figures_in(fields) if not any(f"{p}.".startswith(f"{source}.") for source in sources)]
    assert without == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_is_found_by_the_name_of_its_file_and_prices_thousands_of_devices(path):
    cluster = preset(path.stem)
    assert cluster.name == path.stem
    most = cluster.tiers[-1].devices
    mesh = (16, 24, 8) if most is None or most >= 3072 else (2, 4)
    costs = cluster.mesh_costs(mesh)
    for axis in range(len(mesh)):
        small, large = costs.seconds("all-reduce", 1e3, (axis,)), costs.seconds("all-reduce", 1e9, (axis,))
        assert 0 < small < large < 60


def test_the_presets_that_are_asked_for_exist_under_their_usual_names():
    fixed = (FOLDER / f"{name}.json" for name in ("p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "h200", "b200"))
    assert all(path in FILES for path in fixed)
    names = [
        "dgx2",
        "dgx2-v100-32gb",
        "dgx-a100",
        "dgx-a100-40",
        "dgx-a100-40gb",
        "dgx-a100-80",
        "dgx-a100-80gb",
        "selene",
    ]
    names += ["cpu", "p4d", "dgx-h100", "dgx-h200", "a100-omnipath", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"]
    for name in names:
        assert name in PRESETS
    assert preset("selene") == preset("dgx-a100") == preset("dgx-a100-80gb")


@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "gib", "memory_gb_per_s", "between_gb_per_s_a_node"),
    [
        ("p3.16xlarge", "float16", 125, 16, 900, 3.1),
        ("p3dn.24xlarge", "float16", 125, 32, 900, 12.5),
        ("p4d", "float16", 312, 40, 1555, 50),
        ("dgx-a100-80gb", "bfloat16", 312, 80, 2039, 200),
        ("dgx-h100", "bfloat16", 989, 80, 3350, 400),
        ("dgx-h200", "bfloat16", 989, 141, 4800, 400),
        ("b200", "bfloat16", 2250, 180, 8000, 400),
        ("a100-omnipath", "bfloat16", 312, 80, 2039, 50),
        ("tpu-v4", "bfloat16", 275, 32, 1200, None),
        ("tpu-v5e", "bfloat16", 197, 16, 810, None),
        ("tpu-v5p", "bfloat16", 459, 95, 2800, None),
        ("tpu-v6e", "bfloat16", 918, 32, 1600, None),
    ],
)
def test_presets_hold_the_yardstick_s_figures(name, dtype, tflops, gib, memory_gb_per_s, between_gb_per_s_a_node):
    cluster = preset(name)
    assert cluster.device.peak_of(dtype) == tflops * 1e12
    assert cluster.device.memory_bytes == gib * 2**30
    assert cluster.device.memory_bytes_per_s == memory_gb_per_s * GB
    if between_gb_per_s_a_node is not None:
        assert cluster.tiers[1].bytes_per_s * cluster.tiers[1].ports == between_gb_per_s_a_node * GB


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("dgx-a100", "float16", 271),
        ("dgx-h100", "bfloat16", 778),  # 776 in benchmarks/data/products_h100.json
        ("h200", "bfloat16", 788),
        ("b200", "bfloat16", 1745),
        ("v100-pcie", "float16", 101),
    ],
)
def test_a_product_of_8192_reaches_the_ceiling_that_was_measured(name, dtype, tflops):
    device = preset(name).device
    reached = device.peak_of(dtype) * device.efficiency_of(dtype).of(8192, 8192, 8192)
    assert reached == pytest.approx(tflops * 1e12, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "shape", "tflops"),
    [
        ("g4dn.12xlarge", (4096, 4096, 4096), 24),  # of 65: 70 W
        ("g2-standard-96", (1024, 6016, 1792), 91.4),
        ("mi300x", (4352, 13568, 3840), 758.3),
    ],
)
def test_a_product_reaches_what_a_source_measured_at_its_shape(name, shape, tflops):
    device = preset(name).device
    reached = device.peak_of("float16") * device.efficiency_of("float16").of(*shape)
    assert reached == pytest.approx(tflops * 1e12, rel=1e-2)


def test_every_cluster_that_the_published_steps_name_is_a_preset():
    table = Path(__file__).resolve().parents[1] / "data" / "yardstick" / "published_steps.csv"
    with table.open(newline="") as file:
        named = {row["cluster"] for row in csv.DictReader(file)}
    assert named
    assert named <= set(PRESETS)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("cpu", "cpu", "cpu"),
        ("gpu", "NVIDIA H200", "dgx-h200"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "dgx-a100-80gb"),
        ("gpu", "Tesla V100-SXM2-16GB", "p3.16xlarge"),
        ("tpu", "TPU v5 lite", "tpu-v5e"),
        ("tpu", "TPU v5p", "tpu-v5p"),
        ("tpu", "TPU7x", "tpu-v7"),
        ("gpu", "NVIDIA GB200", "gb200-nvl72"),
        ("gpu", "NVIDIA B200", "b200"),
        ("gpu", "Tesla T4", "g4dn.12xlarge"),
        ("gpu", "Tesla V100-PCIE-16GB", "v100-pcie"),
        ("gpu", "NVIDIA L4", "g2-standard-96"),
        ("gpu", "AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_kind_leads_to_its_preset(platform, kind, name):
    nearest = find_preset(platform, kind)
    assert (nearest.cluster.name, nearest.is_known, nearest.guess) == (name, True, None)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "MI100", "dgx-a100-80gb"),
        ("gpu", "NVIDIA L40S", "dgx-a100-80gb"),
        ("tpu", "TPU v9", "tpu-v5e"),
    ],
)
def test_an_unknown_device_kind_is_guessed_in_words(platform, kind, name):
    nearest = find_preset(platform, kind)
    assert (nearest.cluster.name, nearest.is_known) == (name, False)
    assert f"no cluster preset for devices of kind {kind!r}: they are priced as {name!r}" in nearest.guess
    assert "autopar calibrate -o FILE" in nearest.guess


def test_the_user_is_warned_of_a_guessed_preset_and_of_no_other():
    def choose(platform, kind):
        device = SimpleNamespace(platform=platform, device_kind=kind)
        return choose_cluster(SimpleNamespace(cluster="auto", follow=None, devices=(device,))).name

    with pytest.warns(
        AutoparWarning, match="no cluster preset for devices of kind 'MI100': they are priced as 'dgx-a100-80gb'"
    ):
        assert choose("gpu", "MI100") == "dgx-a100-80gb"
    assert choose("cpu", "cpu") == "cpu"
    assert choose("gpu", "NVIDIA H100 80GB HBM3") == "dgx-h100"


def test_an_unknown_preset_is_answered_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"no cluster preset 'dgxa100'; there are: cpu, .*; nearest: dgx-a100, "):
        preset("dgxa100")


def test_a_preset_survives_being_written_and_read(tmp_path):
    for name in ("p3.16xlarge", "tpu-v4", "cpu", "mixed-a100-v100"):
        text = cluster_text(preset(name), about="a copy", sources={"device": "a preset"})
        (tmp_path / "c.json").write_text(text)
        again = find_cluster(str(tmp_path / "c.json"))
        assert again == preset(name)
        assert again.fingerprint() == preset(name).fingerprint()


def changed(change, name="dgx-a100-80gb"):
    fields = copy.deepcopy(fields_of(name))
    change(fields)
    return fields


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f["device"].update(memory_bytes="80 GB"), 'device.memory_bytes is "80 GB"; a number is expected'),
        (lambda f: f["device"].update(memory_bytes=0), "device.memory_bytes is 0; more than 0 is expected"),
        (lambda f: f["device"].pop("memory_bytes_per_s"), "device lacks 'memory_bytes_per_s'"),
        (lambda f: f["device"]["peak_flops_per_s"].pop("float32"), "device.peak_flops_per_s lacks 'float32'"),
        (lambda f: f["tiers"][1].update(topology="mesh"), "tiers.1.topology is \"mesh\"; one of 'switch', 'ring', "),
        (lambda f: f["tiers"][1].update(latancy_s=1), 'tiers.1 has unknown "latancy_s"; did you mean latency_s?'),
        (lambda f: f["tiers"][0].update(efficiency=1.5), "tiers.0.efficiency is 1.5; at most 1 is expected"),
        (lambda f: f["tiers"][0].update(devices=None), "tiers.0.devices is null; only the outermost tier may join any"),
        (
            lambda f: f["tiers"][1].update(devices=12),
            "tiers.1.devices is 12; a multiple of the 8 devices of the tier below",
        ),
        (lambda f: f.pop("device"), "the file needs either 'device' or, for a mixed cluster, 'node_kinds'"),
        (lambda f: f.update(format="v0"), "format is \"v0\"; 'autopar-cluster-1' is expected"),
        (lambda f: f.update(tiers=[]), "tiers has 0 items; at least 1 are expected"),
        (lambda f: f["tiers"][0].update(topology="hybrid-cube-mesh"), "tiers.0.link_counts: 8 rows of 8 numbers"),
    ],
)
def test_a_bad_file_says_where_what_and_what_is_expected(change, words):
    with pytest.raises(ClusterFileError) as raised:
        cluster_from_json(changed(change), origin="mine.json")
    assert str(raised.value).startswith("mine.json: ")
    assert words in str(raised.value)


def test_files_that_are_missing_or_no_json_say_so(tmp_path):
    (tmp_path / "bad.json").write_text('{"format":\n oops}')
    with pytest.raises(ClusterFileError, match="line 2 is not JSON"):
        load_cluster(tmp_path / "bad.json")
    with pytest.raises(
        ClusterFileError, match=r"No such file or directory; `python -m autopar calibrate -o FILE` writes one"
    ):
        load_cluster(tmp_path / "none.json")


def test_a_mixed_cluster_runs_in_lockstep_with_its_slowest_and_gives_each_kind_apart():
    mixed, a100, v100 = preset("mixed-a100-v100"), preset("p4d"), preset("p3dn")
    assert mixed.device.peak_of("float16") == v100.device.peak_of("float16")
    assert mixed.device.memory_bytes == v100.device.memory_bytes
    assert [kind.count for kind in mixed.node_kinds] == [2, 4]
    assert mixed.of_kind("a100").device == a100.device
    assert mixed.of_kind("v100").tiers[0] == v100.tiers[0]
    inside = mixed.of_kind("a100").mesh_costs((8,)).seconds("all-reduce", 1e9, (0,))
    assert inside == a100.mesh_costs((8,)).seconds("all-reduce", 1e9, (0,))
    with pytest.raises(ValueError, match="has no kind of node 'h100'; it has: a100, v100"):
        mixed.of_kind("h100")


def test_the_devices_of_a_mesh_share_a_transfer():
    machine = find_cluster("p3.16xlarge")  # 3.1 GB/s a node at 0.9 of it, 30 us
    ends = {"source": range(8), "target": range(8, 16)}
    assert machine.transfer_s(1e9, **ends) == pytest.approx(30e-6 + 1e9 / (0.9 * 3.1e9))
    assert machine.transfer_s(0, **ends) == pytest.approx(30e-6)


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        (
            range(7, 8),
            range(8, 9),
            30e-6 + 1e9 / (0.9 * 3.1e9),
        ),  # between nodes, whatever sends has what leaves the node
        (range(5, 8), range(8, 16), 30e-6 + 4 / 3 * 1e9 / (0.9 * 3.1e9)),  # three of four parts of it
        (range(8), range(8, 10), 30e-6 + 1e9 / (0.9 * 3.1e9)),
        (range(1), range(1, 2), 5e-6 + 1e9 / (0.87 * 25e9)),  # one link
        (range(2, 4), range(2), 5e-6 + 0.5e9 / (0.87 * 25e9)),  # 2 to 0 and 3 to 1: each half over one link
        (range(4), range(4, 8), 5e-6 + 0.25e9 / (0.87 * 25e9)),  # 2 to 6 and 3 to 7 have one link
        (range(3, 4), range(4, 5), 5e-6 + 1e9 / (0.87 * 10e9)),  # no link
        (range(11, 12), range(12, 13), 5e-6 + 1e9 / (0.87 * 10e9)),  # nor on the other node
    ],
)
def test_a_transfer_goes_over_the_links_between_its_meshes(source, target, seconds):
    machine = find_cluster("p3.16xlarge")
    assert machine.transfer_s(1e9, source=source, target=target) == pytest.approx(seconds)
    assert machine.transfer_s(1e9, source=target, target=source) == pytest.approx(seconds)


def test_each_device_of_a_switch_has_its_port_to_its_neighbour():
    machine = find_cluster("dgx-a100-80gb")
    one = machine.transfer_s(1e9, source=range(1), target=range(1, 2))
    three = machine.transfer_s(1e9, source=range(3), target=range(3, 8))
    assert three == pytest.approx(one / 3, rel=3e-3)  # the latency aside


def test_a_device_sends_to_another_node_over_its_own_port():
    machine = find_cluster("dgx-a100-80gb")  # eight ports a node
    one = machine.transfer_s(1e9, source=range(7, 8), target=range(8, 9))
    all_eight = machine.transfer_s(1e9, source=range(8), target=range(8, 16))
    assert one == pytest.approx(8 * all_eight, rel=3e-3)


def test_a_pair_of_single_devices_has_its_link_alone():
    machine = Cluster.uniform((1e-6,), (2e-9,))
    assert machine.transfer_s(1000, source=range(1), target=range(1, 2)) == pytest.approx(1e-6 + 2e-6)


def test_a_plan_in_place_of_a_cluster_file_is_told_as_what_it_is(tmp_path):
    (tmp_path / "plan.json").write_text('{"fingerprint": "0", "version": 2, "inputs": []}')
    with pytest.raises(
        ClusterFileError, match=r"plan.json: this is a plan, not a cluster file; `python -m autopar calib"
    ):
        load_cluster(tmp_path / "plan.json")
