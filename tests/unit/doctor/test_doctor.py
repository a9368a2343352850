"""The doctor on a script that knows nothing of this repository: healthy, and with one mistake at a time."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import ladder, pitfalls
from common.doctor import __main__ as program
from common.doctor import checks, launch, record, report, run_script
from common.doctor.recorder import Recorder
from common.doctor.results import Passed, Result
from common.processes import Ranks, ranks
from tests.jobs import job
from tests.unit.doctor.ailments import ENDS, HARMLESS, HEALTHY, MISTAKES, write

QUICK, *SLOW = MISTAKES


def examined(script: Path, folder: Path, *flags: object) -> tuple[dict[str, Result], str]:
    """The doctor's results and report on a script that runs in forks, which saves the import of torch."""
    pool = Ranks(2, on_cpu=True)  # of its own: the observers stay in it
    try:
        pool.run(run_watched, folder, script, flags, timeout=120)
    finally:
        pool.stop()
    records = [record.read(folder / f"rank{rank}" / record.FILE) for rank in range(2)]
    assert not any(one.observer_errors for one in records)
    results = checks.run_all(records)
    text = unwrapped("\n".join(report.lines(results, records)))
    assert "the check failed" not in text
    return results, text


def run_watched(folder: Path, script: Path, flags: tuple) -> None:
    (folder / f"rank{os.environ['RANK']}").mkdir()
    run_script.run(folder, None, script, [str(flag) for flag in flags])


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_a_healthy_script_raises_no_alarm_and_trains_the_weights_that_it_would_alone(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    results, text = examined(HEALTHY, tmp_path, "--out", tmp_path)
    assert "Healthy: nothing found" in text
    right = {topic for topic, result in results.items() if result == Passed()}
    assert results.keys() - right == {"BatchNorm's statistics"}
    ranks(2, on_cpu=True).run(run_alone, HEALTHY, alone)
    weights, expected = (torch.load(folder / "last.pt")["weights"] for folder in (tmp_path, alone))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def run_alone(script: Path, folder: Path) -> None:
    sys.argv = [str(script), "--out", str(folder)]
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_planted_mistake_is_the_first_finding(name, tmp_path):
    ailment = MISTAKES[name]
    results, text = examined(write(tmp_path, ailment.changes), tmp_path, "--out", tmp_path)
    found = report.findings(results)
    topic, first = next(iter(found.items()))
    assert (topic, first.pitfall) == (ailment.topic, ailment.pitfall), text
    assert ailment.said in text
    if topic == "learning rates":
        assert "weights" not in found  # they differ because of that


def test_each_pitfall_is_found_in_a_script_or_named_as_one_that_only_its_author_can_see():
    found = {ailment.pitfall for ailment in [*MISTAKES.values(), *ENDS.values()]} - {None}
    assert found.isdisjoint(checks.ONLY_YOU_CAN_SEE)
    assert found.union(checks.ONLY_YOU_CAN_SEE) == set(pitfalls.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_like_a_mistake_raises_no_alarm(name, tmp_path):
    ailment = HARMLESS[name]
    results, text = examined(write(tmp_path, ailment.changes), tmp_path, "--out", tmp_path)
    assert report.findings(results) == {}
    assert ailment.said in text


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The doctor's exit code and report, from this process, which has imported torch already."""
    code = program.main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return code, unwrapped(out + err)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_bad_end_is_explained(name, tmp_path, capsys):
    ailment = ENDS[name]
    code, text = ask(capsys, "--time-out", 12, write(tmp_path, ailment.changes), "--out", tmp_path)
    assert code == 1, text
    assert text.index(f"FOUND {checks.END}: ") == text.index("FOUND")
    assert ailment.said in text
    assert ailment.pitfall is None or f"`python -m common.pitfalls {ailment.pitfall}`" in text


@pytest.mark.slow
def test_ctrl_c_ends_the_doctor_in_one_line_and_all_of_its_processes(tmp_path):
    script = tmp_path / "endless.py"
    note = "open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}.started', 'w')"
    script.write_text(f"import os, sys, time\n{note}\ntime.sleep(300)\n")
    with job([sys.executable, "-m", "common.doctor", str(script), str(tmp_path)]) as doctor:
        doctor.wait_for(lambda: len(list(tmp_path.glob("*.started"))) == 2)
        doctor.processes[0].send_signal(signal.SIGINT)
        assert doctor.end(seconds=60) == [130]
        assert doctor.err == "interrupted: nothing was examined\n"


def test_a_rank_that_has_ended_is_signalled_once_and_is_not_waited_for(monkeypatch, tmp_path):
    signalled = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signalled.append((pid, number)))
    ended = launch.Rank(0, Path("nowhere"), subprocess.Popen(["true"]))
    with subprocess.Popen(["sleep", "30"]) as hanging:
        (tmp_path / record.PROGRESS).touch()
        launch._wait([ended, launch.Rank(1, tmp_path, hanging)], time_out=1)
        was_waited_for = hanging.poll() is not None
        hanging.kill()
    assert not was_waited_for
    assert launch._stop([ended]) == []
    assert signalled == [(ended.process.pid, signal.SIGKILL)]


@pytest.mark.parametrize("number, cause", [(6, "SIGABRT"), (40, "exit code -40")])  # 40 is a real-time signal
def test_a_rank_that_dies_at_its_exit_has_crashed(number, cause, tmp_path):
    dying = launch.Rank(0, tmp_path, subprocess.Popen(["sh", "-c", f"kill -{number} $$"]))
    dying.process.wait()
    recorder = Recorder(tmp_path, 0, Path("train.py"))
    recorder.finish("crash", "train.py:9: RuntimeError: gloo", line="train.py:9")
    assert recorder.record.waits_in == "train.py:9"
    recorder.finish("finished")
    (tmp_path / launch.LOG).touch()
    records = [launch._record(dying, why_stopped=""), record.Record(1)]
    assert records[0].waits_in == ""
    assert f"after at least 0 steps: after its last line, {cause}" in checks.end.check_end(records).text


LEVEL = ["--dataset", "synthetic", "--train-samples", "250", "--eval-samples", "101", "--batch-size", "96"]
OURS = {
    "02_ddp_raw/train.py": [*LEVEL, "--epochs", "2"],
    "02_ddp_raw/train_fsdp.py": LEVEL,
    "02_ddp_raw/train_mesh.py": [*LEVEL, "--tensor", "2"],
    "03_accelerate/train_full.py": [*LEVEL, "--epochs", "2", "--gradient-accumulation-steps", "2"],
    "04_trainer/train_full.py": [*LEVEL, "--epochs", "2", "--gradient-accumulation-steps", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", OURS)
def test_our_own_scripts_are_healthy(script, tmp_path):
    results, text = examined(ladder.ROOT / script, tmp_path, *OURS[script])
    assert report.findings(results) == {}
    assert "Healthy: " in text or "no rank has whole parameters" in text


@pytest.mark.slow
def test_a_script_that_starts_its_own_processes_is_not_examined(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    script = tmp_path / "script.py"
    say = "print('by torchrun:', torch.distributed.is_torchelastic_launched())"
    script.write_text(f"import torch\n\n{say}\ntorch.multiprocessing.spawn(print, nprocs=2)\n")
    code, text = ask(capsys, script)
    assert code == 2, text
    assert "Nothing was examined: the script starts its own processes with torch.multiprocessing" in text
    assert "The end of rank 0's output: by torchrun: True the script" in text
    assert "too few GPUs (1) for 2 processes" in text


@pytest.mark.slow
def test_a_script_may_have_a_module_that_is_named_as_this_repositorys(tmp_path):
    (tmp_path / "common.py").write_text("print('its own common')\n")
    script = tmp_path / "train.py"
    script.write_text("import common\n")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, run_script.__file__, str(tmp_path), "None", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "its own common\n", done.stderr
