"""The report in the terminal and as a page: complete, self-contained, and right on a phone."""

import base64
import html
import json
import re
import shutil
import subprocess
from itertools import pairwise

import pytest

from benchmarks.report import plots
from benchmarks.report.publish import publish
from benchmarks.report.table import heading, notes, table
from common import ladder
from tests.unit.benchmarks.conftest import ALL_CORES, SHARE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def without_plots(monkeypatch):
    """A page without the comparison's pictures, for tests of what else it has."""
    monkeypatch.setattr(plots, "draw", lambda report, folder: ([], []))


@pytest.mark.parametrize("steps", [6, 60, 937, 1_000_000])
def test_the_terminal_has_80_columns(report, steps):
    report |= {"steps": steps, "global_batch_size": steps, "world_size": 8}
    for text in (heading(report), table(report), notes(report)):
        assert all(len(line) <= 80 for line in text.splitlines()), text
    lines = table(report).splitlines()
    assert "01_data_parallel               2          855      1%        0.94 (0.94 to 0.95)" in lines
    assert "01_data_parallel         1    95.00%     10000            40 20         0badcafe" in lines


def test_what_is_missing_is_a_dash(report):
    report["levels"]["03_accelerate"] = {}
    report["throughput"] = []
    (line,) = [line for line in table(report).splitlines() if line.startswith("03_accelerate")]
    assert line.split() == ["03_accelerate", *"–" * 5]


def test_speeds_are_held_against_one_device_and_all_cores_stand_apart(report):
    speeds, _, computed = table(report).partition("\n\n")
    title, headings, *rows = speeds.splitlines()
    assert title == "Speed at global batch 64, 1 core for each device" and "of level 00 on one device" in headings
    cells = {row.split("  ")[0]: row.split() for row in rows}
    assert list(cells) == [*ladder.levels(), "00_single_gpu, all cores"]  # and no share of a batch
    assert cells["00_single_gpu"][1:] == ["1", "905", "1%", "1"]
    assert cells["00_single_gpu, all cores"][3:6] == ["–", "1305", "0%"]
    assert "all cores" not in computed


def test_speeds_of_undivided_cores_are_held_against_level_00(report, tmp_path, coarse):
    del report["cores_per_device"]
    (group,) = report["throughput"]
    for name in [ALL_CORES, SHARE]:
        del group["rows"][name]
    group["pairs"] = [pair for pair in group["pairs"] if pair["of"] != ALL_CORES]
    for row in group["rows"].values():
        for fact in ("workers", "cores_per_device", "apart"):
            del row[fact]
    printed = publish(report, tmp_path)
    assert "of level 00 on one device" not in printed and "Speed at global batch 64\n" in printed


def test_a_noisy_row_is_marked(report):
    rows = report["throughput"][0]["rows"]
    rows["02_ddp_raw"] |= {"spread": 0.31, "noisy": True}
    assert "31%*" in table(report) and "*: noisy." in notes(report)


def test_what_a_group_notes_stands_below_the_table(report):
    assert "page faults" not in notes(report)
    report["throughput"][0]["notes"] = ["02_ddp_raw, 2 processes: 5572 page faults per step."]
    group = report["throughput"][0]["group"]
    assert f"At {group}, 02_ddp_raw, 2 processes: 5572 page faults per step." in " ".join(notes(report).split())


def test_a_busy_machine_is_named_wherever_the_numbers_are(report, tmp_path, without_plots):
    assert "BUSY" not in notes(report)
    report["busy_cores"] = {"before": 0.0, "after": 1.7}
    publish(report, tmp_path)
    for text in (notes(report), (tmp_path / "report.html").read_text()):
        assert "BUSY: others used 1.7 of 2 cores after the comparison." in " ".join(text.split())


def test_the_page_has_everything_and_loads_nothing(report, tmp_path, coarse):
    printed = publish(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)|@import|url\(|<link", page)
    for name in ("throughput.png", "memory.png", "overhead.png"):
        assert base64.b64encode((tmp_path / name).read_bytes()).decode() in page and name in printed
    text = html.unescape(re.sub("<[^>]*>", "", page))
    for line in (
        "IN STEP: five levels",
        "EXACT: 10000 of 10000 samples on 1, 2 and 3 ranks",
        "BALANCED: fullest device over emptiest: DDP 1.00",
    ):
        assert line in text and line in printed
    for before, after in pairwise(ladder.levels()):
        for hunk in ladder.diff(before, after):
            assert hunk.kind == "equal" or all(line in text for line in hunk.after)
    assert "Memory is simulated, each tensor charged to its device." in text and "Incomplete" not in text


@pytest.mark.slow
def test_the_page_shows_the_lanes_where_they_have_been_recorded(report, tmp_path, without_plots):
    publish(report, tmp_path)
    assert "What happens in one step" not in (tmp_path / "report.html").read_text()
    (tmp_path / "overlap.png").write_bytes(b"a picture")
    publish(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "What happens in one step" in page and base64.b64encode(b"a picture").decode() in page


def test_an_interrupted_run_says_what_it_lacks(report, tmp_path, coarse):
    del report["overhead"], report["levels"]["04_trainer"]["run"]
    printed = publish(report | {"complete": False, "interrupted": True}, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "INTERRUPTED" in printed and "Incomplete: the run was interrupted" in page
    assert "overhead.png was not drawn" in printed and "overhead.png was not drawn" in page
    assert "EXACT? no evaluation of 04_trainer" in page and 'class="broken"' not in page


def test_a_failure_is_shown_with_its_message(report, tmp_path, without_plots):
    failure = {"part": "training 03_accelerate", "level": "03_accelerate", "message": "rank 1: KeyError: <'x'>"}
    printed = publish(report | {"complete": False, "failures": [failure]}, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "FAILED: training 03_accelerate" in printed and "rank 1: KeyError: <'x'>" in printed
    assert "Failed: training 03_accelerate" in page and html.escape(failure["message"]) in page


# A page in a frame of the wanted width: a headless window is never narrower than 500 pixels.
PROBE = """<!doctype html><body><iframe id="f" width="{width}" height="4000" srcdoc="{page}"></iframe>
<pre id="out"></pre><script>document.getElementById("f").onload = event => {{
  const own = event.target.contentDocument, root = own.documentElement;
  const style = (name) => own.defaultView.getComputedStyle(own.querySelector(name));
  document.getElementById("out").textContent = JSON.stringify({{
    scroll: root.scrollWidth, inner: own.defaultView.innerWidth,
    columns: style(".row").gridTemplateColumns.split(" ").length, before: style(".row.equal .before").display,
    images: [...own.images].map(image => [image.naturalWidth, image.width]),
    right: Math.max(...[...own.querySelectorAll(".row code, figure, p, li, h1, h2, h3")]
      .map(element => element.getBoundingClientRect().right)),
  }});
}};</script></body>"""


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not looked at")
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_desktop(report, tmp_path, width):
    """Nothing is wider than the window; the files stand side by side where there is room, else one under the other."""
    publish(report, tmp_path)
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(width=width, page=html.escape((tmp_path / "report.html").read_text())))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'user'}",
    ]
    command += ["--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom", probe.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    seen = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', done.stdout)[1]))
    assert width - 20 <= seen["inner"] <= width
    assert seen["scroll"] <= seen["inner"] and seen["right"] <= seen["inner"]
    assert seen["columns"] == (1 if width < 760 else 2) and seen["before"] == ("none" if width < 760 else "flex")
    assert len(seen["images"]) == 3
    for natural, shown in seen["images"]:
        assert natural > 1500 and shown == min(800, shown) and shown >= min(0.85 * width, 800)
