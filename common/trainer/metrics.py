"""The metrics of a run for people and for files: as a table of text, and as `<split>_results.json`."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.files import write_atomically
from common.trainer.state import as_json


def metrics_format(metrics: dict[str, Any]) -> dict[str, Any]:
    """A copy of `metrics` to be read: times as hours, minutes and seconds, other fractions with four digits."""
    formatted = dict(metrics)
    for name, value in metrics.items():
        if "_runtime" in name:
            whole = int(value)
            hundredths = int(abs(value - whole) * 100)
            formatted[name] = f"{timedelta(seconds=whole)}.{hundredths:02d}"
        elif name == "total_flos":
            formatted[name] = f"{int(value) >> 30}GF"
        elif isinstance(value, float):
            formatted[name] = round(value, 4)
    return formatted


def metrics_table(split: str, metrics: dict[str, Any]) -> str:
    """The formatted metrics, a line for each in the order of their names."""
    formatted = metrics_format(metrics)
    texts = {name: str(value) for name, value in formatted.items()}
    name_width = max(map(len, texts), default=0)
    value_width = max(map(len, texts.values()), default=0)
    lines = [f"***** {split} metrics *****"]
    for name in sorted(texts):
        lines.append(f"  {name.ljust(name_width)} = {texts[name].rjust(value_width)}")
    return "\n".join(lines)


def write_metrics(folder: str, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Write `<split>_results.json` in `folder`, and with `combined` add the metrics to `all_results.json` too."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    _write(Path(folder, f"{split}_results.json"), metrics)
    if not combined:
        return
    everything = Path(folder, "all_results.json")
    known = json.loads(everything.read_text(encoding="utf-8")) if everything.exists() else {}
    _write(everything, known | metrics)


def _write(path: Path, metrics: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(metrics, indent=4, sort_keys=True, default=as_json))
