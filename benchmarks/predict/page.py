"""The prediction as a page that loads nothing: sliders, and two pictures and a table of what follows from them."""

import json
import math
from dataclasses import asdict
from pathlib import Path

from benchmarks.predict import presets
from benchmarks.predict.model import Network, Setup
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Hardware

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


def page(setup: Setup, hardware: Hardware, own_gpu: str | None = None) -> str:
    """The page, whose controls begin at the setup.

    Args:
        own_gpu: the name of a GPU with the setup's rate, in place of the hardware's.
    """
    timed = {setup.network.name: setup.network} | networks()
    rates = {key: {"name": gpu.name, "rate": gpu.resnet50_per_second} for key, gpu in presets.GPUS.items()}
    if own_gpu:
        rates[OWN_GPU] = {"name": own_gpu, "rate": longer_than_resnet50(setup.network) / setup.sample_seconds}
    start = {
        "model": setup.network.name,
        "gpu": OWN_GPU if own_gpu else hardware.gpu,
        "node": hardware.gpus_per_node,
        "inner": hardware.inner,
        "network": round(math.log2(setup.between.bandwidth / presets.GIGABITS_TO_BANDWIDTH), 6),
        "batch": round(math.log2(setup.batch), 6),
        "latency": setup.between.latency * 1e6,
        # Rounded down: to start an operator takes no longer than was measured.
        "launch": math.floor(setup.launch_seconds * 1e7 + 1e-6) / 10,
        "spread": round(100 * setup.speed_spread, 1),
        "contention": 100 * setup.contention,
    }
    data = {
        "start": start,
        "networks": {name: network_data(network) for name, network in timed.items()},
        "gpus": rates,
        "nodes": presets.NODE_SIZES,
        "inner": {key: {"name": name, **presets.INNER[key]._asdict()} for key, name in INNER_NAMES.items()},
        "bytesPerGigabit": presets.GIGABITS_TO_BANDWIDTH,
        "allReduceStart": setup.start,
        "backwardShare": setup.backward_share,
        "bucket": setup.bucket,
        "firstBucket": setup.first_bucket,
    }
    text = (FOLDER / "page.html").read_text()
    for name in ("page.css", "model.js", "page.js"):
        text = text.replace(f"/* {name} */", (FOLDER / name).read_text())
    # In a script element, only "</" could end the data early.
    return text.replace("/* data */", json.dumps(data).replace("</", "<\\/"))


def longer_than_resnet50(network: Network) -> float:
    return max(presets.estimates(network))


def network_data(network: Network) -> dict:
    """A network as model.js takes it."""
    return asdict(network) | {"timesResnet50": longer_than_resnet50(network)}
