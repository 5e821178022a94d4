"""The page of HTML: complete by itself, small, and with the figures of the terminal's report."""

import dataclasses
import html
import html.parser
import itertools
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from autopar.__main__ import main
from autopar.explain.figures import figures_of
from autopar.explain.units import bytes_text, seconds_text
from autopar.reports.html import charts
from autopar.reports.html import page as pages
from autopar.reports.report import draw_schedule
from tests.explain.test_pipelines import TRANSFERS, pipeline_of, stage_of
from tests.plan_examples import BATCH, collective, layer_stack, plan_of

LAYERS = 48


def one_mesh(layers: int = LAYERS):
    items = tuple(
        dataclasses.replace(
            collective("all-reduce", "x", source=f"m.py:{n % 9}"), scope=f"block_{n}/up", algorithm="ring", link="NVLink"
        )
        for n in range(layers)
    )  # fmt: skip
    comm_s = sum(item.count * item.predicted_s for item in items)
    memory = tuple(2**30 + n * 2**24 for n in range(96))
    return plan_of(
        *layer_stack(layers), BATCH, collectives=items, comm_s=comm_s, memory_bytes=memory, flops=1e12, at_peak_s=0.05
    )


def in_stages(stages: int = 16):
    some = [stage_of(n, *layer_stack(3), BATCH, leaves=(f"state/params/block_{n}/up",)) for n in range(stages)]
    sent = tuple(dataclasses.replace(TRANSFERS[0], source=n, target=n + 1) for n in range(stages - 1))
    return pipeline_of(*some, transfers=sent, num_microbatches=64, cuts=tuple(range(stages - 1)))


PLANS = {"one mesh": one_mesh, "stages": in_stages}


class Reader(html.parser.HTMLParser):
    """The tags with their attributes, the text, and the tags that were never closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module", params=PLANS)
def plan(request):
    return PLANS[request.param]()


@pytest.fixture(scope="module")
def text(plan):
    return plan.html()


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


@pytest.mark.sampled(4)
def test_a_page_is_well_formed_small_and_asks_for_nothing(text, read):
    assert len(text.encode()) < 2_000_000
    assert read.open == []
    assert not {"script", "img", "iframe", "object", "embed"} & {tag for tag, _ in read.tags}
    places = [value for _, attrs in read.tags for name, value in attrs.items() if name in ("href", "src", "xlink:href")]
    assert [place for place in places if not place.startswith(("#", "data:,"))] == []
    assert re.findall(r"url\((?!#)|@import", text) == []
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {place[1:] for place in places if place.startswith("#")} <= set(ids)


def test_a_page_has_the_figures_of_the_report(plan, read):
    figures = figures_of(plan)
    for figure in (figures.step_s, figures.compute_s, figures.comm_s):
        assert seconds_text(figure) in read.text
    assert f"peak memory {bytes_text(figures.peak_bytes)} per device" in read.text
    assert "Time of the step" in read.text
    assert "Parameters and state" in read.text
    assert "block_{0..2}/up" in read.text or "block_{0..47}/up" in read.text


def test_a_page_of_stages_shows_the_clock_and_one_of_a_mesh_its_links(plan, read):
    charts = [attrs["aria-label"] for tag, attrs in read.tags if tag == "svg"]
    if figures_of(plan).mfu is None:
        assert charts == [
            "step-wide",
            "step-narrow",
            "stages-wide",
            "stages-narrow",
            "pipeline",
            "memory-wide",
            "memory-narrow",
        ]
        assert all(f"mesh {mesh}" in read.text for mesh in range(16))
    else:
        assert charts == ["step-wide", "step-narrow", "memory-wide", "memory-narrow"]
        assert "NVLink" in read.text
        assert "ring" in read.text


def test_colours_are_those_of_the_page_so_that_it_can_be_dark(text):
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#ffffff"}
    assert "var(--c1)" in drawn


def test_names_are_not_taken_for_markup():
    text = plan_of(*layer_stack(1), BATCH, cluster="<b>mine</b>", fingerprint="<i>").html()
    assert "<b>mine" not in text
    assert "&lt;b&gt;mine" in text


@pytest.mark.sampled(4)
def test_a_page_is_the_same_each_time(plan, text):
    assert plan.html() == text


@pytest.mark.sampled(4)
def test_a_notebook_shows_the_page_in_a_frame_and_without_the_packages_the_line(plan, monkeypatch):
    shown = plan._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    monkeypatch.setattr(pages, "_PACKAGES", ("no_such_package",))
    assert plan._repr_html_() is None


def test_without_the_packages_the_error_says_how_to_get_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pages, "_PACKAGES", ("jinja2", "no_such_package"))
    file = tmp_path / "plan.json"
    file.write_text(in_stages(2).to_json())
    assert main(["explain", str(file), "--html", str(tmp_path / "plan.html")]) == 2
    assert "needs jinja2 and no_such_package: pip install 'autopar[report]'" in capsys.readouterr().err
    assert not (tmp_path / "plan.html").exists()


def test_explain_writes_a_page_from_a_file_and_prints_the_report_without(tmp_path, capsys):
    plan, file, page = in_stages(2), tmp_path / "plan.json", tmp_path / "plan.html"
    file.write_text(plan.to_json())
    assert main(["explain", str(file), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"report written to {page}\n"
    assert page.read_text() == plan.html()
    assert main(["explain", str(file)]) == 0
    assert capsys.readouterr().out.startswith("2 stages x 8 devices")
    assert main(["explain", str(file), "--html", str(tmp_path / "nowhere" / "plan.html")]) == 2


def test_a_plan_needs_no_package_of_charts_until_it_is_drawn():
    code = "import sys, autopar.presented.methods, autopar.reports.report; assert not {'matplotlib', 'jinja2'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 400])
def test_a_browser_opens_the_page_without_an_error(plan, width, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is installed")
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    plan.html(page)
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--window-size={width},2400",
    ]
    done = subprocess.run(
        [browser, *flags, f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 20_000


@pytest.mark.sampled(4)
def test_every_cell_knows_its_column_because_narrow_pages_show_rows_as_cards(plan):
    page = plan.html()
    head = re.search(r"<thead><tr>(.*?)</tr></thead>\s*<tbody>\s*<tr>(.*?)</tr>", page, re.DOTALL)
    columns = re.findall(r"<th [^>]*>([^<]*)</th>", head[1])
    assert columns == re.findall(r'data-name="([^"]*)"', head[2])
    assert "content: attr(data-name)" in page


@pytest.mark.parametrize("factor", [0.9, 1.0, 2.9, 3.1])
def test_a_limit_above_the_peak_is_within_the_picture(factor):
    text = charts.area("memory", [2**33, 2**34], limit=int(factor * 2**34))
    assert text.count(">limit<") == (2 if factor < 3 else 0)
    assert text.count("% of the step") == 2


@pytest.mark.parametrize("letters", [5, 25, 38])
def test_labels_of_an_axis_do_not_touch_however_long_the_names_of_rows_are(letters):
    text = charts.stacked_bars("parts", [("n" * letters, [0.23])], ["compute"])
    wide, narrow = (
        re.findall(r'text-anchor: middle[^>]* x="([\d.]+)"[^>]*>([^<]*)<', part)
        for part in text.split('class="narrow"')
    )
    assert len(wide) >= len(narrow) >= 2
    for labels in (wide, narrow):
        places = [float(place) for place, _ in labels]
        letter = 5.5  # pixels of a letter of 9 points, about
        for (a, b), (x, y) in zip(itertools.pairwise(labels), itertools.pairwise(places), strict=True):
            assert y - x > letter * (len(a[1]) + len(b[1])) / 2
        assert places == pytest.approx(np.linspace(places[0], places[-1], len(places)).tolist())


def test_a_wide_clock_says_that_it_scrolls_and_devices_of_several_nodes_lie_apart():
    plan = dataclasses.replace(in_stages(2), cluster="p3.16xlarge")
    text = pages.page(plan)
    assert '<div class="scrolled gantt">' in text
    assert ".gantt::before { content:" in text
    assert re.findall(r"<i>(node \d)</i>", text) == ["node 0", "node 1"]
    assert ">9 x0 y1</span>" in text, "the place of device 9 along the axes of its mesh"
    assert "<i>node" not in pages.page(in_stages(1)), "the nodes of this machine are not known to differ"


def test_the_picture_of_a_schedule_in_a_terminal_says_where_nodes_begin():
    plan = dataclasses.replace(in_stages(2), cluster="p3.16xlarge", num_microbatches=2)
    heads = [line.partition(" |")[0] for line in draw_schedule(plan).splitlines()]
    assert heads == ["node 0", "mesh 0", "node 1", "mesh 1"]
    assert "node" not in draw_schedule(dataclasses.replace(plan, cluster="a file of mine"))
