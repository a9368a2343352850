"""The page of the prediction: its scripts compute what Python computes, and it fits a phone and a desktop."""

import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.predict import page, presets
from benchmarks.predict.all_reduce import Cluster, Link, all_reduce
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Hardware
from benchmarks.predict.step import DDP, Workload, pays_from, speed_up, step
from benchmarks.your_network import __main__ as program

SHOWN = (2, 8, 64, 512)
NODE = shutil.which("node")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MODEL = page.FOLDER / "model.js"
NARROW = Cluster(4, presets.INNER["pcie3"], presets.NETWORK["25g"], start=presets.START)
WIDE = Cluster(8, presets.INNER["nvlink-a100"], presets.NETWORK["8x200g"])
ONE_EACH = Cluster(1, Link(1e-3, 1e9), Link(3e-5, 2e8), start=1e-5)


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


def training_data(training: Workload) -> dict:
    return {
        "network": page.network_data(training.network),
        "sampleSeconds": training.sample_seconds,
        "launchSeconds": training.launch_seconds,
        "backwardShare": training.backward_share,
        "buckets": DDP._asdict(),
        "speedSpread": training.speed_spread,
        "contention": training.contention,
    }


def cluster_data(cluster: Cluster) -> dict:
    inner, network = cluster.inner._asdict(), cluster.network._asdict()
    return {"gpusPerNode": cluster.gpus_per_node, "inner": inner, "network": network, "start": cluster.start}


def grid() -> list[tuple[Workload, float, int, Cluster]]:
    """Networks, effects, batches, GPUs and links."""
    trainings = []
    for network, effects, launch in itertools.product(networks().values(), (0.0, 0.05), (0.0, 1e-5)):
        seconds = presets.sample_seconds(network, presets.GPUS["v100"])
        training = Workload(network, seconds, launch, 0.6, speed_spread=effects, contention=4 * effects)
        trainings.append(training)
    counts = (1, 2, 8, 64, 512)
    combined = itertools.product(trainings, (1, 100), counts, (NARROW, WIDE, ONE_EACH))
    return [(training, batch, gpus, cluster) for training, batch, gpus, cluster in combined]


@pytest.mark.skipif(not (NODE or CHROMIUM), reason="neither node nor chromium is installed: the scripts are not run")
def test_the_pages_script_computes_what_python_computes(tmp_path):
    points = grid()
    given = []
    expected = []
    for training, batch, gpus, cluster in points:
        given.append([training_data(training), batch, gpus, cluster_data(cluster)])
        seconds = step(training, batch, gpus, cluster)
        expected.append(
            [
                all_reduce(1e7, gpus, cluster),
                seconds,
                seconds,
                speed_up(training, batch * gpus, gpus, cluster),
                pays_from(training, gpus, cluster, 0.5, most=2**16),
            ]
        )
    expression = f"""{json.dumps(given)}.map(([training, batch, gpus, cluster]) => [
        Prediction.allReduce(1e7, gpus, cluster),
        Prediction.step(training, batch, gpus, cluster),
        Object.values(Prediction.parts(training, batch, gpus, cluster)).reduce((sum, part) => sum + part, 0),
        Prediction.speedUp(training, batch * gpus, gpus, cluster),
        Prediction.paysFrom(training, gpus, cluster, 0.5, 2 ** 16),
    ])"""
    found = evaluate(expression, tmp_path)
    assert len(found) == len(expected) > 300
    for (*mine, batch), (*theirs, batch_of_page) in zip(expected, found, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-9)
        assert batch_of_page == batch


def test_the_page_starts_where_the_flags_say_and_loads_nothing(texts_file, tmp_path, capsys):
    path = tmp_path / "page.html"
    flags = ["--gpu", "v100", "--inner", "pcie3", "--network", "25g", "--gpus-per-node", "4", "--batch", "48"]
    program.main(["predict", texts_file, *flags, "--page", str(path)])
    text = path.read_text()
    assert "This is a prediction, not a measurement." in text
    assert not re.search(r'(?:src|href)="|@import|url\(|fetch\(|XMLHttpRequest', text)
    assert set(re.findall(r'value="([^"]*)" selected', text)) == {"texts:build", "v100", "pcie3", "4"}
    for name, shown in {"network": 25, "batch": 48}.items():
        (value,) = re.findall(rf'id="prediction-{name}" [^>]*value="([\d.]+)"', text)
        assert 2 ** float(value) == pytest.approx(shown)
    program.main(["predict", texts_file, "--measured-ms", "5", "--page", str(path)])
    assert '<option value="own" selected>your GPU, measured: 5 ms for 64</option>' in path.read_text()
    with pytest.raises(SystemExit):
        program.main(["predict", texts_file, "--page", "/proc/x.html"])
    assert "error: --page: " in capsys.readouterr().err


# The page in a frame of the wanted width: a headless window is never narrower than 500 pixels.
PROBE = """<!doctype html><body><iframe id="f" width="{width}" height="800" srcdoc="{page}"></iframe>
<pre id="out"></pre><script>document.getElementById("f").onload = event => {{
  const own = event.target.contentDocument, root = own.documentElement, view = own.defaultView;
  const cells = () => [...own.querySelectorAll("#prediction-pays tr")].map(
    row => [...row.cells].map(cell => cell.textContent));
  const before = cells();
  const set = (name, value) => {{
    const field = own.getElementById("prediction-" + name);
    field.value = value;
    field.dispatchEvent(new view.Event("input", {{ bubbles: true }}));
  }};
  set("network", {slider});
  set("model", "VGG-16");
  own.querySelector("details").open = true;
  const box = (element) => element.getBoundingClientRect();
  const sliders = [...own.querySelectorAll("input[type=range]")].map((slider) => {{
    slider.scrollIntoView({{ block: "end" }});
    const picture = box(own.querySelector("svg"));
    return {{
      name: [...slider.labels].map(label => label.textContent).join(),
      said: slider.getAttribute("aria-valuetext"),
      height: box(slider).height,
      seen: picture.top >= 0 && picture.bottom <= view.innerHeight,
      free: picture.left > box(slider).right || picture.bottom <= box(slider).top,
    }};
  }});
  const bars = [...own.querySelectorAll(".bars span")].map(bar => bar.getBoundingClientRect().width);
  document.getElementById("out").textContent = JSON.stringify({{
    before, after: cells(), bars, sliders, scroll: root.scrollWidth, inner: view.innerWidth,
    beside: box(own.querySelector("svg")).left > box(own.querySelector(".controls")).right,
    picture: own.querySelector("svg").getBoundingClientRect().width,
    right: Math.max(...[...own.querySelectorAll(".says, h3, p, li, select, svg, .bars em, .wide")]
      .map(element => element.getBoundingClientRect().right)),
  }});
}};</script></body>"""


def shown_batches(network: str, cluster: Cluster) -> list[list[str]]:
    """The cells that the page's table has to show of a network."""
    training = presets.training(networks()[network], presets.GPUS["a100"])
    lines = []
    for gpus in SHOWN:
        batches = [pays_from(training, gpus, cluster, share) for share in (1 / gpus, 0.5, 0.9)]
        lines.append([str(gpus), *(f"{batch:,}" for batch in batches)])
    return lines


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not looked at")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_answers_its_sliders_and_fits_a_phone_and_a_desktop(tmp_path, width):
    probe = tmp_path / "probe.html"
    gigabits_25 = 4.643856
    shown = page.page(Hardware(), networks()["BasicNet"], None, 64, presets.LAUNCH)
    probe.write_text(PROBE.format(width=width, page=html.escape(shown), slider=gigabits_25))
    dumped = chromium(probe, tmp_path)
    seen = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dumped, re.DOTALL)[1]))
    assert seen["before"] == shown_batches("BasicNet", presets.cluster("nvlink-a100", "8x200g", 8))
    assert seen["after"] == shown_batches("VGG-16", presets.cluster("nvlink-a100", "25g", 8))
    assert width - 20 <= seen["inner"] <= width
    assert seen["scroll"] <= seen["inner"] and seen["right"] <= seen["inner"]
    assert seen["beside"] == (width > 760)
    assert seen["picture"] >= 0.6 * seen["inner"]
    assert len(seen["bars"]) == 1 + len(SHOWN)
    assert len(seen["sliders"]) == 7
    for slider in seen["sliders"]:
        assert slider["name"], "a screen reader says nothing of it"
        assert slider["height"] >= 24
        assert slider["seen"] and slider["free"], f"one cannot see what {slider['name']} does"
    assert seen["sliders"][0]["said"] == "25 Gbit/s"
