"""`pytest benchmarks` and its parts: what they keep, what they leave out and say so; `pytest` leaves them out."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import ceiling, evaluation, launch, loading, memory, network, network_plot, overhead, report
from common import ladder
from common.model import BasicNet
from tests.workers import ranks

SYNTHETIC = ("--dataset", "synthetic")
PEERS = {"accelerate", "lightning", "transformers"}


def _pytest(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ladder.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_extra_info_and_the_recorded_file_hold_everything(tmp_path):
    printed = _pytest(
        "benchmarks/test_evaluation.py", "--quick", "--record", str(tmp_path), f"--benchmark-json={tmp_path}/all.json"
    )
    (benchmark,) = json.loads((tmp_path / "all.json").read_text())["benchmarks"]
    recorded = json.loads((tmp_path / "evaluation.json").read_text())
    assert recorded["suite"] == "evaluation" and recorded["machine"]["cores"] >= 1
    assert recorded["groups"] == [benchmark["extra_info"]]
    assert benchmark["group"] in printed
    for row in benchmark["extra_info"]["rows"].values():
        assert len(row["samples"]) == benchmark["stats"]["rounds"] == 2


def test_plain_pytest_does_not_run_the_benchmarks(pytestconfig):
    assert pytestconfig.getini("testpaths") == ["tests"]


@pytest.mark.parametrize(
    "program, flags, said",
    [
        (overhead, ["--rounds", "0"], "--rounds must be at least 1"),
        (network, ["--quick", "--rounds", "0"], "--rounds must be at least 1"),
        (memory, ["--devices", "2", "0"], "--devices must be at least 1"),
        (report, ["no/such.json"], "no results of a comparison in no/such.json"),
        (report, [str(ladder.ROOT / "README.md")], "no results of a comparison in"),
        (network_plot, ["no/such.json"], "no record of the network in no/such.json"),
    ],
)
def test_a_wrong_value_is_an_error_before_anything_is_measured_or_drawn(program, flags, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program.__name__, *flags])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_without_the_peers_their_rows_are_left_out_and_it_is_said(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in PEERS else real(name))
    rows = [*overhead.contestants(), *launch.imports()]
    assert not any(name.split(".")[0].split(",")[0] in PEERS for name in rows) and "common.trainer" in rows
    (note,) = overhead.skipped()
    assert all(peer in note for peer in PEERS)
    monkeypatch.undo()
    if all(real(peer) for peer in PEERS):
        assert overhead.skipped() == []


@pytest.mark.slow
def test_a_peers_file_is_the_levels_with_the_import_switched(tmp_path):
    script = launch.switched("03_accelerate", "common.accelerator", "accelerate", tmp_path)
    changed = set(script.read_text().splitlines()) ^ set(ladder.script("03_accelerate").read_text().splitlines())
    assert changed and all("accelerat" in line for line in changed)
    assert launch.seconds_to_first_step(ladder.script("00_single_gpu"), 1, SYNTHETIC) > 0
    with pytest.raises(launch.LaunchFailed, match="no-such-flag"):
        launch.seconds_to_first_step(ladder.script("00_single_gpu"), 1, ("--no-such-flag",))


def test_both_pipelines_load_the_same_images():
    ours, theirs = loading.tensors(SYNTHETIC), loading.images(SYNTHETIC)
    assert len(ours) == len(theirs)
    for index in (0, 777):
        image, label = theirs[index]
        assert torch.allclose(ours[index][0], image, atol=1e-6) and ours[index][1] == label


def test_only_the_padded_sampler_counts_samples_twice():
    flags = (*SYNTHETIC, "--eval-samples", "100")
    ways = evaluation.facts(flags)
    assert [row["counted"] for row in ways.values()] == [102, 100, 100]
    assert ways[evaluation.EXACT]["correct"] == ways[evaluation.GATHERED]["correct"]
    assert [row["collectives"] for row in ways.values()][:2] == [1, 1]
    # Two tensors for each of a single step, and what makes the shards of the last one equally long.
    assert ways[evaluation.GATHERED]["collectives"] >= 2
    assert all("seconds" in row for row in ranks(evaluation.RANKS).run(evaluation.evaluate, evaluation.EXACT, flags))


def test_the_flops_of_an_image_are_those_of_its_layers():
    """By hand, two for each multiply-add: forward, and backward to weights and inputs; the image needs no gradient."""
    conv1, conv2 = 2 * 26 * 26 * 32 * 9, 2 * 24 * 24 * 64 * 32 * 9
    linear = 2 * (9216 * 128 + 128 * 10)
    assert ceiling.flops_per_image() == 2 * conv1 + 3 * (conv2 + linear)
    assert sum(p.numel() for p in BasicNet().parameters()) == 1_199_882


def test_the_matmul_rate_is_that_of_the_products_done(monkeypatch):
    seconds = iter(range(100))  # each product takes one
    monkeypatch.setattr(ceiling.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    if torch.cuda.is_available():
        pytest.skip("the size differs on a GPU")
    assert ceiling.matmul_rate(3) == pytest.approx(2 * 1024**3 * 2 / 3 / 1e9)
