"""The prediction as a page that loads nothing.

Python answers for all positions of the sliders, and the page's script draws the answer that is looked for.
"""

import itertools
import json
from pathlib import Path

from benchmarks.predict import presets
from benchmarks.predict.model import LARGEST_BATCH, PAYS, Network, Setup, global_batches, pays_from, worth
from benchmarks.predict.presets import Hardware

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN = (2, 8, 64, 512)  # GPUs


def page(network: Network, hardware: Hardware) -> str:
    """The page about a network, whose sliders begin at the hardware."""
    choices = {  # in the order of Hardware's fields
        "gpu": list(presets.GPUS),
        "inner": list(presets.INNER),
        "gpus_per_node": list(presets.NODE_SIZES),
        "network": list(presets.NETWORK),
    }
    answers = {}
    for chosen in itertools.product(*choices.values()):
        setup = presets.setup(network, Hardware(*chosen))
        name = " ".join(map(str, chosen))  # by which the script finds it
        answers[name] = [curve(setup, gpus) for gpus in SHOWN]
    data = {
        "name": network.name,
        "pays": PAYS,
        "largestBatch": LARGEST_BATCH,
        "choices": choices,
        "start": hardware._asdict(),
        "answers": answers,
    }
    # In a script element, only "</" could end the data early.
    return TEMPLATE.read_text().replace("/* data */", json.dumps(data).replace("</", "<\\/"))


def curve(setup: Setup, gpus: int) -> dict:
    """What so many GPUs are worth with each global batch, from one sample on each GPU on."""
    worths = [round(worth(setup, batch, gpus), 3) for batch in global_batches(gpus)]
    return {"gpus": gpus, "worths": worths, "paysFrom": pays_from(setup, gpus)}
