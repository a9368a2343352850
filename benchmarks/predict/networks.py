"""Networks that are counted already, layer by layer. A test counts those of networks.json anew."""

import functools
import json
from pathlib import Path

from benchmarks.predict.step import Layer, Network

PATH = Path(__file__).with_name("networks.json")


@functools.cache
def networks() -> dict[str, Network]:
    """All networks, by name."""
    found = {}
    for name, counted in json.loads(PATH.read_text()).items():
        layers = [Layer(*numbers) for numbers in counted["layers"]]
        found[name] = Network(name, tuple(layers), counted["operators"], counted["bytes_of_a_sample"])
    return found
