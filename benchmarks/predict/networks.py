"""Networks that are counted already. A test counts those of networks.json anew."""

import functools
import json
from pathlib import Path

from benchmarks.predict.model import Gradient, Network

PATH = Path(__file__).with_name("networks.json")


@functools.cache
def networks() -> dict[str, Network]:
    """All networks, by name."""
    found = {}
    for name, counted in json.loads(PATH.read_text()).items():
        counted["gradients"] = tuple(Gradient(*numbers) for numbers in counted["gradients"])
        found[name] = Network(name, **counted)
    return found
