"""The prediction as a page that loads nothing: sliders, and two pictures and a table of what follows from them."""

import html
import json
import math
from pathlib import Path

from benchmarks.predict import presets
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Gpu, Hardware
from benchmarks.predict.step import DDP, Network

FOLDER = Path(__file__).parent
INNER_NAMES = {
    "nvlink-p100": "NVLink, P100 (72 GB/s)",
    "nvlink-v100": "NVLink, V100 (120 GB/s)",
    "nvlink-a100": "NVLink, A100 (235 GB/s)",
    "nvlink-h100": "NVLink, H100 and H200 (371 GB/s)",
    "nvlink-b200": "NVLink, B200 (722 GB/s)",
    "pcie3": "PCIe 3.0 x16 (12 GB/s)",
    "pcie4": "PCIe 4.0 x16 (24 GB/s)",
}
OWN_GPU = "own"
SHARED_BATCH = 4096  # samples in all, where the page begins
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>How many GPUs pay? A prediction</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>STYLE</style></head>
<body><main>
<h1>How many GPUs pay?</h1>
<p class="says"><b>This is a prediction, not a measurement.</b> It is computed from published figures for links, GPUs
and networks.</p>
<div class="tool"><form class="controls" autocomplete="off">CONTROLS</form>
<div class="answers"><div class="efficiency"><h3>Efficiency: how many of the GPUs one gets</h3>
<svg id="prediction-picture" role="img" aria-label="Efficiency against the number of GPUs"></svg>
<ul class="legend"><li style="--key:var(--weak)"><span id="prediction-weak"></span></li>
<li style="--key:var(--strong)"><span id="prediction-strong"></span></li></ul></div>
<div><h3>Where the time of a step goes, in weak scaling</h3>
<div class="bars" id="prediction-parts"></div>
<ul class="legend"><li style="--key:var(--compute)">compute</li>
<li style="--key:var(--slow)">waiting for the slowest GPU</li>
<li style="--key:var(--contention)">compute slowed by all-reduces</li>
<li style="--key:var(--weak)">all-reduces that backward does not hide</li></ul>
<h3>From which batch on do they pay?</h3>
<p>The smallest batch in all, a power of two, with which so many GPUs beat one GPU on the same batch. If that batch does
not fit into the memory of one GPU, it would take it in pieces.</p>
<div class="wide"><table class="pays"><thead><tr><th>GPUs</th><th>faster than one</th><th>worth half as many</th>
<th>worth 90 % as many</th></tr></thead><tbody id="prediction-pays"></tbody></table></div></div></div></div>
<noscript><p>The sliders need JavaScript.</p></noscript>
<script type="application/json" id="prediction-data">DATA</script>
<script>
MODEL</script>
<script>
SCRIPT</script>
</main></body></html>
"""


def page(hardware: Hardware, network: Network, own_gpu: Gpu | None, batch: int, launch_seconds: float) -> str:
    """The page.

    Args:
        hardware, network, batch: what its controls stand at when it is opened; `batch` for each GPU.
        own_gpu: to be shown in place of the hardware's.
        launch_seconds: to start one operator.
    """
    all_networks = {network.name: network} | networks()
    gpus = presets.GPUS
    chosen = hardware.gpu
    if own_gpu:
        gpus = {OWN_GPU: own_gpu} | gpus
        chosen = OWN_GPU
    gigabits = presets.NETWORK[hardware.network].bandwidth / presets.GIGABITS_TO_BANDWIDTH
    # Rounded down: to start an operator takes no longer than was measured.
    launch = math.floor(10 * launch_seconds / presets.MICROSECOND + 1e-6) / 10
    controls = [
        choice("model", "Network", {name: name for name in all_networks}, network.name),
        choice("gpu", "GPU", {key: gpu.name for key, gpu in gpus.items()}, chosen),
        choice(
            "node", "GPUs of a node", {str(size): str(size) for size in presets.NODE_SIZES}, str(hardware.gpus_per_node)
        ),
        choice("inner", "Links within a node", INNER_NAMES, hardware.inner),
        # Powers of two from 6.25 Gbit/s to 3200 Gbit/s.
        slider("network", "Network of a node", round(math.log2(gigabits), 6), 2.643856, 11.643856, 1),
        batch_slider("batch", "Samples for each GPU (weak)", batch, 12),
        batch_slider("global", "Samples in all (strong)", SHARED_BATCH, 20),
        "<details><summary>Assumptions</summary>",
        slider("latency", "A message between nodes", 9.6, 0.6, 60, 1),
        slider("launch", "Starting an operator", launch, 0, 20, 0.1),
        slider("spread", "GPUs differ by (standard deviation)", round(100 * presets.SPEED_SPREAD, 1), 0, 4.1, 0.1),
        slider("contention", "An all-reduce slows compute by", 100 * presets.CONTENTION, 0, 40, 0.1),
        "</details>",
    ]
    data = {
        "networks": {name: network_data(network) for name, network in all_networks.items()},
        "gpus": {key: {"name": gpu.name, "rate": gpu.resnet50_per_second} for key, gpu in gpus.items()},
        "inner": {name: link._asdict() for name, link in presets.INNER.items()},
        "bytesPerGigabit": presets.ethernet(1).bandwidth,
        "start": presets.START,
        "backwardShare": 2 / 3,
        "buckets": DDP._asdict(),
    }
    parts = {
        "SCRIPT": (FOLDER / "page.js").read_text(),
        "MODEL": (FOLDER / "model.js").read_text(),
        # In a script element, only "</" could end the data early.
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
        "CONTROLS": "".join(controls),
        "STYLE": (FOLDER / "page.css").read_text(),
    }
    text = PAGE
    for name, part in parts.items():  # from the end, so that a name is not found in what was filled in
        text = text.replace(name, part, 1)
    return text


def network_data(network: Network) -> dict:
    """A network as model.js takes it."""
    times_resnet50 = max(presets.estimates(network))
    return {"operators": network.operators, "timesResnet50": times_resnet50, "layers": network.layers}


def batch_slider(name: str, title: str, batch: int, most: int) -> str:
    """A slider of the binary logarithm, whose steps double the batch."""
    value = round(math.log2(batch), 6)
    least = round(value % 1, 6)
    return slider(name, title, value, least, most + least, 1)


def choice(name: str, title: str, options: dict[str, str], chosen: str) -> str:
    identity = f"prediction-{name}"
    shown = ""
    for value, text in options.items():
        state = " selected" if value == chosen else ""
        shown += f'<option value="{html.escape(value)}"{state}>{html.escape(text)}</option>'
    label = f'<label for="{identity}">{title}</label>'
    return f'<div class="control">{label}<select id="{identity}">{shown}</select></div>'


def slider(name: str, title: str, value: float, low: float, high: float, step: float) -> str:
    identity = f"prediction-{name}"
    bounds = f'min="{low}" max="{high}" step="{step}" value="{value}"'
    # The script says the value in its unit: as a text beside the name, and to screen readers as the slider's value.
    shown = f'<label for="{identity}">{title}</label><output for="{identity}" aria-live="off"></output>'
    return f'<div class="control">{shown}<input type="range" id="{identity}" {bounds}></div>'
