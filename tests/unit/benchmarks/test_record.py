"""One command records a machine: where it writes, and what it runs."""

import json
import subprocess
import sys

import pytest

from benchmarks import record
from common import ladder


@pytest.mark.parametrize(
    ("name", "folder"), [("2 x RTX 4090", "2-x-rtx-4090"), ("H100, NVLink", "h100-nvlink"), ("../../etc", "etc")]
)
def test_a_name_becomes_a_folder_of_the_results(name, folder):
    assert record.folder_of(name) == ladder.ROOT / "benchmarks" / "results" / folder


@pytest.mark.parametrize(("name", "why"), [("…", "no letter or digit"), ("amd epyc 2 cores", "--again replaces it")])
def test_a_record_without_a_name_of_its_own_is_refused(name, why, capsys):
    with pytest.raises(SystemExit):
        record.main(["--name", name])
    assert why in capsys.readouterr().err


def test_gpus_are_checked_before_anything_is_measured(tmp_path):
    checks = list(record.first_on_gpus(4))
    assert list(record.stages(tmp_path, quick=False, gpus=4)) == checks + list(record.stages(tmp_path, quick=False))
    page = (ladder.ROOT / "tests" / "gpu" / "README.md").read_text()
    for title in checks:
        assert f"| {title} |" in page, title
    for path in record.GPU_CHECKS:
        assert (ladder.ROOT / path).exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_quick_record_on_cpu_processes_holds_levels_and_suites(tmp_path):
    program = (
        "import sys; from pathlib import Path; from benchmarks import record; "
        "record.RESULTS = Path(sys.argv[1]); record.main(['--name', 'A laptop', '--quick'])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ladder.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "a-laptop" / "results.json").read_text())
    assert results["complete"] and set(results["levels"]) == set(ladder.levels())
    assert json.loads((tmp_path / "a-laptop" / "timeline.json").read_text())["suite"] == "timeline"
