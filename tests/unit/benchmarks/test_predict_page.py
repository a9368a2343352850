"""The page of the prediction: its scripts compute what Python computes, and it fits a phone and a desktop."""

import html
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.predict import page, presets
from benchmarks.predict.model import Link, Setup, all_reduce, pays_from, speed_up, step
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Hardware
from benchmarks.your_network import __main__ as program

SHOWN = (2, 8, 64, 512)
NODE = shutil.which("node")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MODEL = page.FOLDER / "model.js"
CLUSTERS = (
    (4, presets.INNER["pcie3"], presets.NETWORK["25g"]),
    (8, presets.INNER["nvlink-a100"], presets.NETWORK["8x200g"]),
    (1, Link(1e-3, 1e9), Link(3e-5, 2e8)),
)


def chromium(path: Path, folder: Path) -> str:
    """The page as it is after its scripts have run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync", "--no-first-run", f"--user-data-dir={folder / 'user'}"]
    command += ["--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240).stdout


def evaluate(expression: str, folder: Path) -> list:
    """The value of an expression of JavaScript that may use `Prediction`, by node or else by Chromium."""
    if NODE:
        script = folder / "script.js"
        script.write_text(f"{MODEL.read_text()}\nconsole.log(JSON.stringify({expression}));")
        done = subprocess.run([NODE, str(script)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    path = folder / "script.html"
    writes = f'document.getElementById("out").textContent = JSON.stringify({expression});'
    path.write_text(f'<pre id="out"></pre><script>{MODEL.read_text()}\n{writes}</script>')
    return json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', chromium(path, folder))[1]))


def as_the_page_has_it(setup: Setup) -> dict:
    """A Setup as model.js takes it."""
    return {
        "network": page.network_data(setup.network),
        "batch": setup.batch,
        "sampleSeconds": setup.sample_seconds,
        "launchSeconds": setup.launch_seconds,
        "gpusPerNode": setup.gpus_per_node,
        "inner": setup.inner._asdict(),
        "between": setup.between._asdict(),
        "start": setup.start,
        "backwardShare": setup.backward_share,
        "bucket": setup.bucket,
        "firstBucket": setup.first_bucket,
        "speedSpread": setup.speed_spread,
        "contention": setup.contention,
    }


def grid() -> list[tuple[Setup, int]]:
    """Networks, effects, batches, links and numbers of GPUs."""
    found = []
    for name, effect, launch, batch, cluster, gpus in itertools.product(
        ("BasicNet", "ResNet-50", "VGG-16"), (0.0, 0.05), (0.0, 1e-5), (1, 100), CLUSTERS, (1, 2, 8, 64, 512)
    ):
        gpus_per_node, inner, between = cluster
        setup = replace(
            presets.setup(networks()[name], Hardware("v100"), batch),
            launch_seconds=launch,
            gpus_per_node=gpus_per_node,
            inner=inner,
            between=between,
            speed_spread=effect,
            contention=4 * effect,
        )
        found.append((setup, gpus))
    return found


@pytest.mark.skipif(not (NODE or CHROMIUM), reason="neither node nor chromium is installed: the scripts are not run")
def test_the_pages_script_computes_what_python_computes(tmp_path):
    points = grid()
    given = [[as_the_page_has_it(setup), gpus] for setup, gpus in points]
    expression = f"""{json.dumps(given)}.map(([setup, gpus]) => [
        Prediction.allReduce(setup, 1e7, gpus),
        Prediction.step(setup, gpus),
        Object.values(Prediction.parts(setup, gpus)).reduce((sum, part) => sum + part, 0),
        Prediction.speedUp(setup, setup.batch * gpus, gpus),
        Prediction.paysFrom(setup, gpus, 0.5, 2 ** 16),
    ])"""
    for (setup, gpus), found in zip(points, evaluate(expression, tmp_path), strict=True):
        seconds = step(setup, gpus)
        expected = [all_reduce(setup, 1e7, gpus), seconds, seconds, speed_up(setup, setup.batch * gpus, gpus)]
        assert found[:-1] == pytest.approx(expected, rel=1e-9)
        assert found[-1] == pays_from(setup, gpus, 0.5, most=2**16)


def test_the_page_starts_where_the_flags_say_and_loads_nothing(texts_file, tmp_path):
    path = tmp_path / "page.html"
    flags = ["--gpu", "v100", "--inner", "pcie3", "--network", "25g", "--gpus-per-node", "4", "--batch", "48"]
    program.main(["predict", texts_file, *flags, "--measured-ms", "5", "--page", str(path)])
    text = path.read_text()
    assert "This is a prediction, not a measurement." in text
    assert not re.search(r'(?:src|href)="|@import|url\(|fetch\(|XMLHttpRequest', text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    start = data["start"]
    assert (start["model"], start["gpu"], start["inner"], start["node"]) == ("texts:build", "own", "pcie3", 4)
    assert 2 ** start["network"] == pytest.approx(25)
    assert 2 ** start["batch"] == pytest.approx(48)
    own = data["gpus"]["own"]
    assert own["name"] == "your GPU, measured: 5 ms for 48"
    assert 48 * data["networks"]["texts:build"]["timesResnet50"] / own["rate"] == pytest.approx(0.005)


# The page in a frame of the wanted width: a headless window is never narrower than 500 pixels.
PROBE = """<!doctype html><body><iframe id="f" width="{width}" height="800" srcdoc="{page}"></iframe>
<pre id="out"></pre><script>document.getElementById("f").onload = event => {{
  const own = event.target.contentDocument, view = own.defaultView;
  const cells = () => [...own.querySelectorAll("#pays tr")].map(
    row => [...row.cells].map(cell => cell.textContent));
  const before = cells();
  const set = (name, value) => {{
    const field = own.getElementById(name);
    field.value = value;
    field.dispatchEvent(new view.Event("input", {{ bubbles: true }}));
  }};
  set("network", {slider});
  set("model", "VGG-16");
  own.querySelector("details").open = true;
  const box = (element) => element.getBoundingClientRect();
  document.getElementById("out").textContent = JSON.stringify({{
    before, after: cells(), scroll: own.documentElement.scrollWidth, inner: view.innerWidth,
    beside: box(own.querySelector("svg")).left > box(own.querySelector(".controls")).right,
    right: Math.max(...[...own.querySelectorAll("h3, p, li, select, svg, .bars em, .wide")]
      .map(element => box(element).right)),
  }});
}};</script></body>"""


def shown_batches(network: str, hardware: Hardware) -> list[list[str]]:
    """The cells that the page's table has to show of a network."""
    setup = presets.setup(networks()[network], hardware, 64)
    lines = []
    for gpus in SHOWN:
        batches = [pays_from(setup, gpus, share) for share in (1 / gpus, 0.5, 0.9)]
        lines.append([str(gpus), *(f"{batch:,}" for batch in batches)])
    return lines


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not looked at")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_answers_its_sliders_and_fits_a_phone_and_a_desktop(tmp_path, width):
    probe = tmp_path / "probe.html"
    gigabits_25 = 4.643856
    shown = page.page(presets.setup(networks()["BasicNet"], Hardware(), 64), Hardware())
    probe.write_text(PROBE.format(width=width, page=html.escape(shown), slider=gigabits_25))
    dumped = chromium(probe, tmp_path)
    seen = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dumped, re.DOTALL)[1]))
    assert seen["before"] == shown_batches("BasicNet", Hardware())
    assert seen["after"] == shown_batches("VGG-16", Hardware(network="25g"))
    assert width - 20 <= seen["inner"] <= width
    assert seen["scroll"] <= seen["inner"] and seen["right"] <= seen["inner"]
    assert seen["beside"] == (width > 760)
