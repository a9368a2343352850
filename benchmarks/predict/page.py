"""The prediction as a page that loads nothing: sliders with what follows from them, and the published cases."""

import html
import itertools
import json
import math
from pathlib import Path
from typing import NamedTuple

from benchmarks.predict import presets
from benchmarks.predict.all_reduce import ALGORITHMS, FASTEST, Link
from benchmarks.predict.networks import networks
from benchmarks.predict.published import Case, cases, off_by, predict
from benchmarks.predict.step import DDP, Buckets, Network
from common.ladder import html_page

FOLDER = Path(__file__).parent
STYLE = (FOLDER / "page.css").read_text()
WIDEST_LOSS = 0.8  # at the right end of a case's scale
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
ALGORITHM_NAMES = {
    "ring": "one ring through all GPUs",
    "tree": "one tree over all GPUs",
    "two rings": "rings in nodes, rings between them",
    "ring and tree": "rings in nodes, trees between them",
    "fastest": "whichever is fastest",
}


class Start(NamedTuple):
    """What the controls of a page stand at when it is opened, and what they offer beside the presets.

    Attributes:
        hardware: by the names of the presets.
        network: to be shown in place of BasicNet.
        gpu: to be shown in place of the hardware's.
        batch: samples for each GPU, in weak scaling.
        divided_batch: samples in all, in strong scaling.
        launch_seconds: to start one operator.
    """

    hardware: presets.Hardware = presets.Hardware()
    network: Network | None = None
    gpu: presets.Gpu | None = None
    batch: int = 64
    divided_batch: int = 4096
    launch_seconds: float = presets.LAUNCH

    @property
    def networks(self) -> dict[str, Network]:
        own = {self.network.name: self.network} if self.network else {}
        return own | networks()

    @property
    def gpus(self) -> dict[str, presets.Gpu]:
        own = {OWN_GPU: self.gpu} if self.gpu else {}
        return own | presets.GPUS


USUAL = Start()


def page(start: Start = USUAL) -> str:
    """A page of its own."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>How many GPUs pay? A prediction</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{html_page.STYLE}{STYLE}</style></head>\n<body><main>\n"
        f"<h1>How many GPUs pay?</h1>\n{section(start)}\n</main></body></html>\n"
    )


def section(start: Start = USUAL) -> str:
    """The prediction as a fragment of HTML, with its scripts. STYLE and the ladder's `html_page.STYLE` belong to it."""
    return "\n".join(
        [
            '<section class="prediction" id="prediction">',
            '<p class="says"><b>This is a prediction, not a measurement.</b> It is computed from published figures for '
            "links, GPUs and networks. Further down it is compared with published measurements, and it says where it "
            "is off.</p>",
            f'<div class="tool"><form class="controls" autocomplete="off">{_controls(start)}</form>{ANSWERS}</div>',
            "<noscript><p>The sliders need JavaScript.</p></noscript>",
            _published(),
            _scripts(start),
            "</section>",
        ]
    )


# The efficiency stands apart from the other answers: on a phone it stays in sight above the sliders.
ANSWERS = (
    '<div class="answers"><div class="efficiency"><h3>Efficiency: how many of the GPUs one gets</h3>'
    '<svg id="prediction-picture" role="img" aria-label="Efficiency against the number of GPUs"></svg>'
    '<ul class="legend"><li style="--key:var(--weak)"><span id="prediction-weak"></span></li>'
    '<li style="--key:var(--strong)"><span id="prediction-strong"></span></li></ul></div>'
    "<div><h3>Where the time of a step goes, in weak scaling</h3>"
    '<div class="bars" id="prediction-parts"></div>'
    '<ul class="legend"><li style="--key:var(--compute)">compute</li>'
    '<li style="--key:var(--slow)">waiting for the slowest GPU</li>'
    '<li style="--key:var(--contention)">compute slowed by all-reduces</li>'
    '<li style="--key:var(--weak)">all-reduces that backward does not hide</li></ul>'
    "<h3>From which batch on do they pay?</h3>"
    "<p>The smallest batch in all, a power of two, with which so many GPUs beat one GPU on the same batch. If "
    "that batch does not fit into the memory of one GPU, it would take it in pieces.</p>"
    '<div class="wide"><table class="pays"><thead><tr><th>GPUs</th><th>faster than one</th>'
    '<th>worth half as many</th><th>worth 90 % as many</th></tr></thead><tbody id="prediction-pays"></tbody>'
    "</table></div></div></div>"
)


def _controls(start: Start) -> str:
    hardware = start.hardware
    network = start.network.name if start.network else "BasicNet"
    network_names = {name: name for name in start.networks}
    gpu_names = {key: gpu.name for key, gpu in start.gpus.items()}
    node_sizes = {str(size): f"{size}" for size in presets.NODE_SIZES}
    gigabits = presets.NETWORK[hardware.network].bandwidth / presets.GIGABITS_TO_BANDWIDTH
    spread = round(100 * presets.SPEED_SPREAD, 1)
    return "".join(
        [
            _choice("model", "Network", network_names, network),
            _choice("gpu", "GPU", gpu_names, OWN_GPU if start.gpu else hardware.gpu),
            _choice("node", "GPUs of a node", node_sizes, str(hardware.gpus_per_node)),
            _choice("inner", "Links within a node", INNER_NAMES, hardware.inner),
            # Powers of two from 6.25 Gbit/s to 3200 Gbit/s.
            _slider("network", "Network of a node", round(math.log2(gigabits), 6), 2.643856, 11.643856, 1),
            _batch_slider("batch", "Samples for each GPU (weak)", start.batch, 12),
            _batch_slider("global", "Samples in all (strong)", start.divided_batch, 20),
            "<details><summary>Assumptions</summary>",
            _choice("algorithm", "All-reduce", ALGORITHM_NAMES, FASTEST),
            _slider("latency", "A message between nodes", 9.6, 0.6, 60, 1),
            _slider("launch", "Starting an operator", _launch(start), 0, 20, 0.1),
            _slider("spread", "GPUs differ by (standard deviation)", spread, 0, 4.1, 0.1),
            _slider("contention", "An all-reduce slows compute by", 18.9, 0, 40, 0.1),
            "</details>",
        ]
    )


def _launch(start: Start) -> float:
    """Microseconds, rounded down: no slower than was measured."""
    return math.floor(10 * start.launch_seconds / presets.MICROSECOND + 1e-6) / 10


def _batch_slider(name: str, title: str, batch: int, most: int) -> str:
    """A slider of the binary logarithm, whose steps double the batch."""
    value = round(math.log2(batch), 6)
    least = round(value % 1, 6)
    return _slider(name, title, value, least, most + least, 1)


def _choice(name: str, title: str, options: dict[str, str], chosen: str) -> str:
    identity = f"prediction-{name}"
    shown = ""
    for value, text in options.items():
        state = " selected" if value == chosen else ""
        shown += f'<option value="{html.escape(value)}"{state}>{html.escape(text)}</option>'
    label = f'<label for="{identity}">{title}</label>'
    return f'<div class="control">{label}<select id="{identity}">{shown}</select></div>'


def _slider(name: str, title: str, value: float, low: float, high: float, step: float) -> str:
    identity = f"prediction-{name}"
    bounds = f'min="{low}" max="{high}" step="{step}" value="{value}"'
    # The script says the value in its unit: as a text beside the name, and to screen readers as the slider's value.
    shown = f'<label for="{identity}">{title}</label><output for="{identity}" aria-live="off"></output>'
    return f'<div class="control">{shown}<input type="range" id="{identity}" {bounds}></div>'


def _published() -> str:
    rows = "".join(_case_row(case) for case in cases())
    return (
        "<h3>Compared with published measurements</h3>"
        "<p>Lost efficiency is 100 % minus the efficiency. Nothing was fitted to these cases: all have the same "
        "assumptions. The range is what is left if all assumptions are kind, or all of them harsh. “Network alone” is "
        "what would be lost if all GPUs were equally fast and an all-reduce slowed nothing down.</p>"
        '<ul class="legend"><li style="--key:var(--strong)">published</li><li style="--key:var(--weak)">predicted, '
        "and its range</li></ul>"
        '<div class="wide"><table class="cases"><thead><tr><th>lost efficiency</th><th>published</th>'
        '<th>predicted</th><th>off by</th><th class="alone">network alone</th>'
        '<th class="range"><span>0 %</span><span>80 %</span></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        "<p>*: not all inputs of this case are published.</p>"
        f"<details><summary>Where each case is from</summary><dl>{_origins()}</dl></details>"
        f"{_where_it_is_off()}"
    )


def _origins() -> str:
    """Where each case is from. Cases of one series share a remark, which is said once."""
    shown = ""
    for remark, series in itertools.groupby(cases(), key=lambda case: case.remark):
        for source, of_source in itertools.groupby(series, key=lambda case: case.source):
            for case in of_source:
                shown += f"<dt>{html.escape(case.name)}</dt>"
            shown += f"<dd>{html.escape(source)}.</dd>"
        shown += f"<dd>{html.escape(remark)}</dd>"
    return shown


def _case_row(case: Case) -> str:
    prediction = predict(case)
    published = 1 - case.efficiency
    mark = "" if case.inputs_are_published else "*"
    left = _place(prediction.kind)
    scale = (
        f'<i class="span" style="left:{left}%;width:{_place(prediction.harsh) - left}%"></i>'
        f'<i class="predicted" style="left:{_place(prediction.lost)}%"></i>'
        f'<i class="measured" style="left:{_place(published)}%"></i>'
    )
    cells = [
        f"<td>{html.escape(case.name)}{mark}</td>",
        f"<td>{published:.1%}</td>",
        f"<td>{prediction.lost:.1%}</td>",
        f"<td>× {off_by(case):.1f}</td>",
        f'<td class="alone">{prediction.network_alone:.1%}</td>',
        f'<td class="range"><span class="scale">{scale}</span></td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _place(loss: float) -> float:
    """The place of a loss on its scale, in percent of the scale's width."""
    return round(100 * loss / WIDEST_LOSS, 1)


def _where_it_is_off() -> str:
    by_name = {case.name: case for case in cases()}
    vgg = predict(by_name["Horovod, VGG-16, 512 GPUs"])
    inception = predict(by_name["Horovod, Inception V3, 512 GPUs"])
    return (
        "<h3>Where it is off</h3><ul>"
        "<li>VGG-16 on 512 GPUs loses nearly twice as much as predicted. Even the harsh end of the range, where the "
        f"messages of a long ring wait 1.9 times as long, is only {vgg.harsh:.0%}. What 128 servers reach of their "
        "25 Gbit/s when all of them send is not published; the prediction takes 96 %.</li>"
        "<li>Inception V3 and ResNet-101 on 512 GPUs lose less than two thirds of what is predicted, and no more than "
        f"on 128. The network alone would lose {inception.network_alone:.0%} at most. The rest of the prediction is "
        "slow GPUs and contention: their averages come from other, newer GPUs and other networks.</li>"
        "<li>Goyal et al. lose twice what is predicted. They read images from disk and sum small gradients on the "
        "CPU, which the model does not know.</li>"
        "<li>VGG-16 on 8 P100 of one process loses several times as much as predicted, and so does ResNet-50 on the "
        "shared cluster of Li et al. Inputs of both are not published.</li></ul>"
    )


def _scripts(start: Start) -> str:
    # In a script element, only "</" could end the data early.
    data = json.dumps(page_data(start), separators=(",", ":")).replace("</", "<\\/")
    model = (FOLDER / "model.js").read_text()
    own = (FOLDER / "page.js").read_text()
    return (
        f'<script type="application/json" id="prediction-data">{data}</script>\n'
        f"<script>\n{model}</script>\n<script>\n{own}</script>"
    )


def page_data(start: Start = USUAL) -> dict:
    """Data of the presets and the networks for the page's scripts."""
    gpus = {key: {"name": gpu.name, "rate": gpu.resnet50_per_second} for key, gpu in start.gpus.items()}
    return {
        "networks": {name: network_data(network) for name, network in start.networks.items()},
        "gpus": gpus,
        "inner": {name: link_data(link) for name, link in presets.INNER.items()},
        "bytesPerGigabit": presets.ethernet(1).bandwidth,
        "start": presets.START,
        "backwardShare": 2 / 3,
        "buckets": buckets_data(DDP),
        "algorithms": ALGORITHMS,
    }


def network_data(network: Network) -> dict:
    """A network as model.js takes it."""
    times_resnet50 = max(presets.estimates(network))
    return {"operators": network.operators, "timesResnet50": times_resnet50, "layers": network.layers}


def link_data(link: Link) -> dict:
    """A link as model.js takes it."""
    return {"latency": link.latency, "bandwidth": link.bandwidth}


def buckets_data(buckets: Buckets) -> dict:
    """A rule for buckets as model.js takes it."""
    return {"size": buckets.size, "first": buckets.first, "waitsUntilFull": buckets.waits_until_full}
