"""The page of the prediction: it has what Python computes, answers its sliders, and fits a phone and a desktop."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.predict import presets
from benchmarks.predict.model import Network, pays_from, worth
from benchmarks.predict.page import SHOWN, page
from benchmarks.predict.presets import Hardware
from benchmarks.your_network import __main__ as program
from tests.unit.benchmarks.published import counted

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_page_starts_where_the_flags_say_and_loads_nothing(texts_file, tmp_path):
    path = tmp_path / "page.html"
    flags = ["--gpu", "v100", "--inner", "pcie3", "--network", "25g", "--gpus-per-node", "4"]
    program.main(["predict", texts_file, *flags, "--page", str(path)])
    text = path.read_text()
    assert not re.search(r'(?:src|href)="|@import|url\(|fetch\(|XMLHttpRequest', text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["start"] == {"gpu": "v100", "inner": "pcie3", "gpus_per_node": 4, "network": "25g"}


# The page in a frame of the wanted width: a headless window is never narrower than 500 pixels.
PROBE = """<!doctype html><meta charset="utf-8"><body>
<iframe id="f" width="{width}" height="800" srcdoc="{page}"></iframe>
<pre id="out"></pre><script>document.getElementById("f").onload = event => {{
  const own = event.target.contentDocument, view = own.defaultView;
  const cells = () => [...own.querySelectorAll("#table tr")].map(
    row => [...row.cells].map(cell => cell.textContent));
  const before = cells();
  for (const [name, value] of {moved}) {{
    const field = own.getElementById(name);
    field.value = value;
    field.dispatchEvent(new view.Event("input", {{ bubbles: true }}));
  }}
  document.getElementById("out").textContent = JSON.stringify({{
    before, after: cells(), scroll: own.documentElement.scrollWidth, inner: view.innerWidth,
    right: Math.max(...[...own.querySelectorAll("p, label, svg, svg *, table")]
      .map(element => element.getBoundingClientRect().right)),
  }});
}};</script></body>"""


def after_its_scripts(path: Path, folder: Path) -> str:
    """The page as Chromium has it in the end."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync", "--no-first-run", f"--user-data-dir={folder / 'user'}"]
    command += ["--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240).stdout


def expected_table(network: Network, hardware: Hardware, batch: int) -> list[list[str]]:
    """The cells that the page has to show for a batch in all."""
    setup = presets.setup(network, hardware)
    rows = []
    for gpus in SHOWN:
        share = f"{worth(setup, batch, gpus):.0%}".replace("%", " %") if batch >= gpus else "–"
        rows.append([str(gpus), share, f"{pays_from(setup, gpus):,}"])
    return rows


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not looked at")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_answers_its_sliders_and_fits_a_phone_and_a_desktop(tmp_path, width):
    network = counted("VGG-16")
    shown = page(network, Hardware())
    moved = json.dumps([["network", 0], ["gpus_per_node", 2], ["batch", 7]])
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(width=width, page=html.escape(shown), moved=moved))
    dumped = after_its_scripts(probe, tmp_path)
    seen = json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dumped, re.DOTALL)[1]))
    assert seen["before"] == expected_table(network, Hardware(), batch=1024)
    assert seen["after"] == expected_table(network, Hardware(network="25g", gpus_per_node=4), batch=128)
    assert width - 20 <= seen["inner"] <= width
    assert seen["scroll"] <= seen["inner"] and seen["right"] <= seen["inner"]
