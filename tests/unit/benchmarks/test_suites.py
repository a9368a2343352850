"""`pytest benchmarks` and its parts: what they keep, what they leave out and say so; `pytest` leaves them out."""

import importlib.util
import json
import sys

import pytest
import torch

from benchmarks.harness.groups import CannotMeasure, Extent
from benchmarks.report import network_plot, roofline_plot
from benchmarks.report import publish as report
from benchmarks.suites import ceiling, evaluation, interpreter_lock, launch, loading, memory, network, overhead
from common import ladder
from common.model import BasicNet
from common.processes import ranks
from tests.nested_pytest import run_pytest

SYNTHETIC = ("--dataset", "synthetic")
PEERS = {"accelerate", "lightning", "transformers"}


def _pytest(*arguments: str) -> str:
    done = run_pytest("-q", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_extra_info_and_the_recorded_file_hold_everything(tmp_path):
    printed = _pytest(
        "benchmarks/suites/test_evaluation.py",
        "--quick",
        "--record",
        str(tmp_path),
        f"--benchmark-json={tmp_path}/all.json",
    )
    benchmarks = json.loads((tmp_path / "all.json").read_text())["benchmarks"]
    recorded = json.loads((tmp_path / "evaluation.json").read_text())
    assert recorded["suite"] == "evaluation" and recorded["machine"]["cores"] >= 1
    (group,) = recorded["groups"]
    assert group["group"] in printed and "these numbers say little" in printed
    assert {benchmark["params"]["row"] for benchmark in benchmarks} == set(group["rows"])
    for benchmark in benchmarks:
        row = group["rows"][benchmark["params"]["row"]]
        assert benchmark["group"] == group["group"]
        assert benchmark["extra_info"]["counted"] == row["counted"]
        assert [1000 * seconds for seconds in benchmark["stats"]["data"]] == pytest.approx(row["samples"])
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
        (roofline_plot, ["no/such.json"], "no record of the ceiling in no/such.json"),
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


@pytest.mark.long
def test_a_peers_file_is_the_levels_with_the_import_switched(tmp_path):
    script = launch.switched(launch.PEERS["03 on accelerate"], tmp_path)
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


def test_the_seconds_of_a_product_are_the_mean_of_those_done(monkeypatch):
    seconds = iter(range(100))  # each run takes one
    monkeypatch.setattr(ceiling.time, "perf_counter", lambda: next(seconds))
    runs = []
    assert ceiling._seconds_of(lambda: runs.append(1), 3) == 1
    assert len(runs) == 1 + 3


def test_the_bytes_of_a_step_are_those_that_its_operations_read_and_write():
    with ceiling._Bytes() as counter:
        a = torch.ones(256)
        b = a.view(16, 16)
        b + b
    # `ones` writes 1 KiB, the view moves nothing, the sum reads 1 KiB twice and writes it.
    assert counter.moved == 4 * 1024


def test_the_roof_is_the_lower_one_of_both_limits():
    step = ceiling.Work(flops=100, moved=50)
    assert step.roof(flops_per_second=1000, bytes_per_second=100) == 200
    assert step.roof(flops_per_second=150, bytes_per_second=100) == 150


def test_replicas_side_by_side_do_not_wait_for_the_generator_that_threads_share():
    replica = interpreter_lock.Worker(samples=1)
    before = torch.get_rng_state()
    replica.forwards(1)
    assert torch.equal(torch.get_rng_state(), before)


ON_ONE_CPU = {"global_batch_size": 64, "processes": 1, "workers": 1, "device": "cpu"}


def test_a_level_is_placed_under_the_roofline():
    level = "00_single_gpu"
    step = ceiling.work(64)
    samples = {ceiling.MATMUL: [10.0], ceiling.COPY: [50.0], level: [40.0]}
    record = ceiling.record(samples, {level: ON_ONE_CPU}, gpus=0)
    row = record["rows"][level]
    assert row["gflops_per_sec"] == pytest.approx(step.flops / 1e9 / 0.040, rel=1e-3)
    product = record["rows"][ceiling.MATMUL]["gflops_per_sec"]
    bandwidth = record["rows"][ceiling.COPY]["gigabytes_per_sec"]
    assert bandwidth == pytest.approx(2 * ceiling.COPIED_BYTES / 1e9 / 0.050, rel=1e-3)
    assert row["roof_gflops_per_sec"] == pytest.approx(step.roof(product, bandwidth), rel=1e-3)
    assert row["share_of_roof"] == pytest.approx(row["gflops_per_sec"] / row["roof_gflops_per_sec"], rel=1e-3)
    assert any("of its roof" in note for note in record["notes"])
    alone = ceiling.record({level: [40.0]}, {level: ON_ONE_CPU}, gpus=0)
    assert "share_of_roof" not in alone["rows"][level]


def test_a_level_on_two_gpus_has_the_roof_of_both():
    one, two, shared = "00_single_gpu", "02_ddp_raw, 2 processes", "on one GPU of two processes"
    samples = {ceiling.MATMUL: [10.0], ceiling.COPY: [5.0], one: [40.0], two: [20.0]}
    facts = {
        one: ON_ONE_CPU | {"device": "cuda", "global_batch_size": 128},
        two: {"device": "cuda", "global_batch_size": 128, "processes": 2, "workers": 2},
    }
    rows = ceiling.record(samples, facts, gpus=4)["rows"]
    assert rows[one]["devices"] == 1 and rows[two]["devices"] == 2
    assert rows[two]["gflop_per_step"] == rows[one]["gflop_per_step"]
    # Each GPU does in 20 ms half of what the one does in 40 ms.
    assert rows[two]["share_of_roof"] == pytest.approx(rows[one]["share_of_roof"], rel=1e-3)
    rows = ceiling.record(samples | {shared: [40.0]}, facts | {shared: facts[two]}, gpus=1)["rows"]
    assert rows[shared]["devices"] == 1


def test_every_level_does_the_same_step_under_the_roofline():
    assert {configuration.batch_size for configuration in ceiling.configurations()} == {ceiling.BATCH_SIZE}


def test_each_of_two_processes_moves_the_bytes_of_an_optimizer_step():
    names = {"one process": 1, "two processes": 2}
    facts = {}
    for name, processes in names.items():
        facts[name] = {"device": "cpu", "global_batch_size": 128, "processes": processes, "workers": 2}
    rows = ceiling.record({name: [40.0] for name in names}, facts, gpus=0)["rows"]
    weights = sum(parameter.nbytes for parameter in BasicNet().parameters())
    # It reads the weight, its gradient and both means, and writes all but the gradient.
    more = rows["two processes"]["gigabytes_per_step"] - rows["one process"]["gigabytes_per_step"]
    assert more * 1e9 > 7 * weights


def test_the_roofline_is_drawn_from_a_record_alone(tmp_path):
    level = "00_single_gpu"
    samples = {ceiling.MATMUL: [10.0], ceiling.COPY: [50.0], level: [40.0]}
    record = ceiling.record(samples, {level: ON_ONE_CPU}, gpus=0)
    machine = {"processor": "abacus", "cores": 2, "gpus": [], "torch": "2"}
    file = tmp_path / "ceiling.json"
    file.write_text(json.dumps({"machine": machine, "groups": [record]}))
    folder = tmp_path / "plots"
    roofline_plot.main([str(file), "--out", str(folder)])
    assert (folder / roofline_plot.NAME).read_bytes().startswith(b"\x89PNG")
    del record["rows"][ceiling.COPY]
    with pytest.raises(KeyError):
        roofline_plot.draw(record, machine, folder)
    assert not list(folder.iterdir()), "an old plot can be taken for new"


def test_two_nodes_are_looked_for_when_they_are_needed_and_not_before(monkeypatch):
    monkeypatch.setattr(network, "why_not", lambda: pytest.fail("a namespace was made while tests are collected"))
    (group,) = network.groups()
    assert len(group.rows) == 10
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces need root")
    extent = Extent(rounds=1, seconds=0.1, data_flags=SYNTHETIC, quick=True)
    with pytest.raises(CannotMeasure, match="no two nodes: network namespaces need root"):
        group.measure(group.rows, extent)


def test_the_names_of_the_starts_are_those_of_the_contestants(tmp_path):
    assert list(launch.launches(SYNTHETIC, tmp_path)) == launch.launch_names()


def test_the_rows_of_loading_are_its_contestants(monkeypatch):
    monkeypatch.setattr(loading, "tensors", lambda flags: None)
    monkeypatch.setattr(loading, "images", lambda flags: None)
    assert {*loading.contestants((), 1), loading.STEP} == set(loading.ROWS)
