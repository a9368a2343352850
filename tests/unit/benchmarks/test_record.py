"""One command records a machine: what it checks, runs, leaves behind and says."""

import json
import subprocess
import sys

import pytest

from benchmarks import record
from common import ladder

QUIET = record.Conditions(gpus=2, cores=16, busy=0.1, mnist=True, missing_peers=())


@pytest.mark.parametrize(
    ("name", "folder"), [("2 x RTX 4090", "2-x-rtx-4090"), ("H100, NVLink", "h100-nvlink"), ("../../etc", "etc")]
)
def test_a_name_becomes_a_folder_of_the_results(name, folder):
    assert record.folder_of(name) == ladder.ROOT / "benchmarks" / "results" / folder


def test_a_name_without_letters_is_refused(capsys):
    with pytest.raises(SystemExit):
        record.main(["--name", "…"])
    assert "has no letter or digit" in capsys.readouterr().err


def test_a_record_is_not_replaced_by_accident(capsys):
    with pytest.raises(SystemExit):
        record.main(["--name", "amd epyc 2 cores"])
    assert "--again replaces it" in capsys.readouterr().err


def test_what_would_spoil_the_numbers_is_said_before():
    assert record.remarks(QUIET) == []
    spoiled = record.Conditions(gpus=0, cores=2, busy=1.5, mnist=False, missing_peers=("lightning",))
    said = " | ".join(record.remarks(spoiled))
    for word in ("0 GPUs", "others use 1.5 of 2 cores", "MNIST is not on disk", "lightning"):
        assert word in said


def test_every_gpu_gets_a_process_and_a_stage_that_fails_does_not_end_the_others(tmp_path):
    asked = []

    def run(stage):
        asked.append(stage.command)
        return 1 if len(asked) == 1 else 0

    failed = record.record(8, tmp_path, quick=False, run=run)
    assert failed == ["all levels: training, proof, speed and memory"]
    assert asked[0][-3:] == ["--world-size", "8", "--full"]
    assert asked[1][-2:] == ["--record", str(tmp_path)]


def test_gpus_are_checked_before_anything_is_measured(tmp_path):
    titles = [stage.title for stage in record.stages(4, tmp_path, quick=False, gpus=4)]
    checks = [stage.title for stage in record.first_on_gpus(4)]
    assert titles[: len(checks)] == checks
    assert titles[len(checks) :] == [stage.title for stage in record.stages(4, tmp_path, quick=False)]
    page = (ladder.ROOT / "tests" / "gpu" / "README.md").read_text()
    for stage in record.first_on_gpus(4):
        title = stage.title.removeprefix("first: ")
        assert f"| {title} |" in page, title
    for path in record.GPU_CHECKS:
        assert (ladder.ROOT / path).exists()


def test_only_a_whole_record_is_asked_for_and_links_only_where_there_are_some():
    folder = record.RESULTS / "a-laptop"
    assert "pull request" not in record.last_words("A laptop", folder, gpus=0, quick=True)
    assert "nvidia-smi" not in record.last_words("A laptop", folder, gpus=1, quick=False)
    asked = record.last_words("A server", folder, gpus=2, quick=False)
    assert "git add benchmarks/results/a-laptop" in asked and "nvidia-smi topo -m" in asked


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_quick_record_on_cpu_processes_holds_levels_and_suites(tmp_path):
    program = (
        "import sys; from pathlib import Path; from benchmarks import record; "
        "record.RESULTS = Path(sys.argv[1]); record.main(['--name', 'A laptop', '--quick'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ladder.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything runs here" in done.stdout
    results = json.loads((tmp_path / "a-laptop" / "results.json").read_text())
    assert results["complete"]
    assert set(results["levels"]) == set(ladder.levels())
    assert json.loads((tmp_path / "a-laptop" / "evaluation.json").read_text())["suite"] == "evaluation"
    assert json.loads((tmp_path / "a-laptop" / "timeline.json").read_text())["suite"] == "timeline"
