"""The doctor on a script that knows nothing of this repository: healthy, and with one mistake at a time."""

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from common.doctor import __main__ as program
from common.doctor import compare_calls, compare_data, compare_models, record, report, watch_data, watched
from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.launch import Rank
from common.doctor.record import Model, Pass, Record
from common.errors import UserError
from common.pitfalls import NAMES
from common.processes import Ranks
from tests.unit.doctor.mistakes import ENDS, HARMLESS, MISTAKES, REDUCE

ROOT = Path(__file__).parents[3]
HEALTHY = Path(__file__).with_name("patients") / "healthy.py"
QUICK, *SLOW = MISTAKES


def planted(changes: dict[str, str], folder: Path) -> Path:
    """The healthy script with `changes`."""
    text = HEALTHY.read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "patient.py"
    path.write_text(text)
    return path


def examined(script: Path, folder: Path, *flags: object) -> tuple[dict[str, Answer], str]:
    """The doctor's answers and report on a script that runs in forks, which saves the import of torch."""
    pool = Ranks(2, on_cpu=True)  # of its own: the observers stay in it
    try:
        pool.run(run_watched, folder, script, flags or ("--out", folder), timeout=120)
    finally:
        pool.stop()
    records = [record.read(folder / f"rank{rank}.pickle") for rank in range(2)]
    assert not any(one.troubles for one in records)
    ranks = [Rank(one, 0, "", hung=False) for one in records]
    answers = report.answers(ranks, patience=60)
    return answers, unwrapped("\n".join(report.lines(ranks, answers, verbose=True)))


def run_watched(folder: Path, script: Path, flags: tuple) -> None:
    watched.run(folder, int(os.environ["RANK"]), None, script, [str(flag) for flag in flags])


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_a_healthy_script_raises_no_alarm(tmp_path):
    answers, text = examined(HEALTHY, tmp_path)
    assert report.findings(answers) == {}
    assert "Healthy: nothing found; 14 things are right" in text
    assert answers["weights"].text == "equal on all ranks, compared after 16 optimizer steps"
    assert answers["evaluation samples"].text == "101 of 101, each once"


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_planted_mistake_is_the_first_finding(name, tmp_path):
    mistake = MISTAKES[name]
    answers, text = examined(planted(mistake.changes, tmp_path), tmp_path)
    topic, first = next(iter(report.findings(answers).items()))
    assert (topic, first.pitfall) == (mistake.topic, mistake.pitfall), text
    assert any(letter.isdigit() for letter in first.text)
    assert first.pitfall is None or first.pitfall in NAMES
    assert mistake.text in text
    assert "Not healthy: " in text


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_like_a_mistake_raises_no_alarm(name, tmp_path):
    changes, expected = HARMLESS[name]
    answers, text = examined(planted(changes, tmp_path), tmp_path)
    assert report.findings(answers) == {}
    assert expected in text


def test_weights_that_are_averaged_now_and_then_are_no_finding():
    apart, equal = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])
    records = [Record(rank, steps=4, models=[Model("Net", wrapped=True, forwards=4)]) for rank in range(2)]
    for rank, one in enumerate(records):
        one.models[0].weights = {step: {"w": apart + rank if step % 2 else equal} for step in range(1, 5)}
    assert isinstance(compare_models.weights(records), Healthy)
    for one in records:
        del one.models[0].weights[2], one.models[0].weights[4]
    assert isinstance(compare_models.weights(records), Finding)


def read_by(orders: list[list[int]], contents: list[list[int]], each_once: bool = True) -> list[Record]:
    """Records of ranks that read these numbers of a data set of 1,000, in batches of 4, and contents with them."""
    records = []
    for rank, (numbers, of_rank) in enumerate(zip(orders, contents, strict=True)):
        one = Pass(0, 1000, True, each_once, samples=numbers, batches=len(numbers) // 4, last_batch=4, forwards=9)
        one.contents = [(content, content % 3) for content in of_rank]
        records.append(Record(rank, passes=[one]))
    return records


def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


LAP = shuffled(1000, 0)
HALVES = [LAP[::2], LAP[1::2]]
IN_ORDER = [list(range(0, 1000, 2)), list(range(1, 1000, 2))]
OWN = [shuffled(1000, rank) for rank in range(2)]
DRAWN = torch.randint(1000, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
DRAWN[1][0] = DRAWN[0][0]
NEXT_LAP = [order + shuffled(1000, rank)[:16] for rank, order in enumerate(HALVES)]


def doubled(orders: list[list[int]]) -> list[list[int]]:
    """The contents of a data set that has each sample twice."""
    return [[number // 2 for number in order] for order in orders]


@pytest.mark.parametrize(
    "records, kind, pitfall",
    [
        pytest.param(read_by(HALVES, HALVES), Healthy, None, id="dealt out"),
        pytest.param(read_by(HALVES, doubled(HALVES)), Healthy, None, id="samples twice in the data set"),
        pytest.param(read_by(IN_ORDER, doubled(IN_ORDER)), Healthy, None, id="twins are neighbours, and dealt apart"),
        pytest.param(read_by(OWN, OWN), Finding, "different_orders", id="an order for each rank"),
        pytest.param(read_by([LAP, LAP], [LAP, LAP]), Finding, None, id="one order for all ranks"),
        pytest.param(read_by([LAP[:12]] * 2, [LAP[:12]] * 2, False), Finding, None, id="one order, and any sampler"),
        pytest.param(read_by(HALVES, [LAP[:500], OWN[1][:500]]), Finding, "different_orders", id="another data order"),
        pytest.param(read_by([LAP, OWN[1]], [LAP, range(2000, 3000)]), Unseen, None, id="a data set for each rank"),
        pytest.param(read_by(DRAWN, DRAWN, False), Unseen, None, id="drawn with weights"),
        pytest.param(read_by(NEXT_LAP, NEXT_LAP, False), Unseen, None, id="an endless sampler has begun anew"),
    ],
)
def test_training_samples(records, kind, pitfall):
    answer = compare_data.shards(records)
    assert isinstance(answer, kind), answer
    assert getattr(answer, "pitfall", None) == pitfall


@pytest.mark.parametrize("pad", [0, 1, -100])
def test_a_text_is_the_same_however_far_it_is_filled_up(pad):
    short, long = [5, 6, 7, 8], [3, 1, 4, 5, 9, 2, 6]
    alone = watch_data._contents(torch.tensor([short, short[::-1]]), 2)
    right = watch_data._contents(torch.tensor([short + 3 * [pad], long]), 2)
    left = watch_data._contents({"words": torch.tensor([long, 3 * [pad] + short])}, 2)
    assert alone[0] == right[0] == left[1]
    assert right[1] == left[0]
    assert len({*alone, *right}) == 3


def test_collectives_that_not_all_ranks_make_are_found():
    calls = [("all_reduce", "patient.py:9"), ("barrier", "patient.py:12")]
    fewer = [Record(0, ended="whole", collectives=calls), Record(1, ended="whole", collectives=calls[:1])]
    assert compare_calls.collectives(fewer).pitfall == "collective_on_rank_0"
    assert compare_calls.collectives(fewer[::-1]).pitfall is None
    fewer[0].ended = "crash"
    assert isinstance(compare_calls.collectives(fewer), Unseen)
    equal = [Record(rank, ended="whole", collectives=calls) for rank in range(2)]
    assert isinstance(compare_calls.collectives(equal), Healthy)


COMMAND = [sys.executable, "-m", "common.doctor"]


def ask(*arguments: object) -> tuple[int, str]:
    """The doctor's exit code and report, from this process, which has imported torch already."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = program.main([*map(str, arguments)])
    return code, unwrapped(out.getvalue())


# The others end as one of these does: with an error of torch's, or with a rank that waits.
FREQUENT_ENDS = ("collective on rank 0", "a rank that leaves its loop", "crash")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in FREQUENT_ENDS else pytest.mark.long) for name in ENDS]
)
def test_a_bad_end_is_explained(name, tmp_path):
    mistake = ENDS[name]
    code, text = ask("--time-out", 12, "--verbose", planted(mistake.changes, tmp_path), "--out", tmp_path)
    assert code == 1, text
    assert text.index(f"FOUND {mistake.topic}: ") == text.index("FOUND")
    assert mistake.text in text
    assert mistake.pitfall is None or f"`python -m common.pitfalls {mistake.pitfall}`" in text
    assert "the same on all ranks" not in text


@pytest.mark.slow
def test_ctrl_c_ends_the_doctor_in_one_line_and_all_of_its_processes(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(
        "import os, sys, time\nprint(os.getpid(), flush=True)\nopen(sys.argv[1] + os.environ['RANK'], 'w')"
        ".write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    doctor = subprocess.Popen([*COMMAND, script, f"{tmp_path}/pid"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in pids):
        assert doctor.poll() is None
        time.sleep(0.1)
    doctor.send_signal(signal.SIGINT)
    _, errors = doctor.communicate(timeout=60)
    assert doctor.returncode == 130
    assert errors == "interrupted: nothing was examined\n"
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


@pytest.mark.slow
def test_the_doctor_changes_no_weight(tmp_path):
    watched_run, alone = tmp_path / "watched", tmp_path / "alone"
    for folder in (watched_run, alone):
        folder.mkdir()
    examined(HEALTHY, watched_run)
    pool = Ranks(2, on_cpu=True)
    try:
        pool.run(run_alone, HEALTHY, alone)
    finally:
        pool.stop()
    weights, expected = (torch.load(folder / "best.pt")["weights"] for folder in (watched_run, alone))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def run_alone(script: Path, folder: Path) -> None:
    sys.argv = [str(script), "--out", str(folder)]
    runpy.run_path(str(script), run_name="__main__")


LEVEL = ["--dataset", "synthetic", "--train-samples", "250", "--eval-samples", "101", "--batch-size", "96"]
TEMPLATE = ["--arch", "squeezenet1_1", "--size", "32", "--epochs", "2", "--batch-size", "8", "--workers", "1"]
OURS = {
    "02_ddp_raw/train.py": [*LEVEL, "--epochs", "2"],
    "03_accelerate/train.py": [*LEVEL, "--epochs", "2"],
    "03_accelerate/train_full.py": [*LEVEL, "--epochs", "2", "--gradient-accumulation-steps", "2"],
    "04_trainer/train.py": [*LEVEL, "--epochs", "2"],
    "04_trainer/train_full.py": [*LEVEL, "--epochs", "2", "--gradient-accumulation-steps", "2"],
    "03_accelerate/examples/cifar_resnet18.py": ["--max-steps", "5", "--samples", "160"],
    "03_accelerate/examples/wide_net.py": [
        *("--epochs", "2", "--batch-size", "16", "--train-samples", "64", "--eval-samples", "50"),
    ],
}


# Each of the others has a template or a pitfall of its kind among the slow tests.
OFTEN = ("02_ddp_raw/train.py", "04_trainer/train.py")


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=pytest.mark.slow if script in OFTEN else pytest.mark.long) for script in OURS],
)
def test_our_own_scripts_are_healthy(script, tmp_path):
    more = ["--output-dir", tmp_path / "out"] if "wide_net" in script else []
    answers, text = examined(ROOT / script, tmp_path, *OURS[script], *more)
    assert report.findings(answers) == {}
    assert "Healthy: " in text


@pytest.mark.parametrize(
    "level",
    [
        pytest.param("02_ddp_raw", marks=pytest.mark.long),
        pytest.param("03_accelerate", marks=pytest.mark.slow),
        pytest.param("04_trainer", marks=pytest.mark.long),
    ],
)
def test_the_templates_are_healthy(level, tmp_path):
    for split, count in {"train": 25, "val": 9}.items():
        for brightness in (60, 120):
            folder = tmp_path / split / str(brightness)
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 48), (brightness, number, 9 * number)).save(folder / f"{number}.png")
    code, text = ask(ROOT / level / "template.py", tmp_path, *TEMPLATE, "--checkpoint", tmp_path / "run")
    assert code == 0, text
    assert "Healthy: nothing found" in text


@pytest.mark.parametrize(
    "name", [pytest.param("test_script", marks=pytest.mark.slow), pytest.param("test_sync", marks=pytest.mark.long)]
)
def test_scripts_of_the_original_are_healthy(name, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    code, text = ask(Path(accelerate.__file__).parent / "test_utils" / "scripts" / f"{name}.py")
    assert code == 0, text
    assert "Healthy: nothing found" in text


WITHOUT_GROUP = {
    '    torch.distributed.init_process_group("gloo")\n': "",
    REDUCE: "",
    "        torch.distributed.all_reduce(counts)\n": "",
    "self.model = DDP(self.net)": "self.model = self.net",
    "self.model.module": "self.model",
    "    torch.distributed.destroy_process_group()\n": "",
}
LAUNCHER = "import torch.multiprocessing as mp\n\nmp.spawn(print, nprocs=2)\n"


@pytest.mark.slow
def test_what_cannot_be_examined_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    for text, reason in (
        (LAUNCHER, "the script starts its own processes with torch.multiprocessing"),
        ("import torch\n\nprint('no training')\n", "the script printed last: no training"),
        (planted(WITHOUT_GROUP, tmp_path).read_text(), "the script made no process group"),
    ):
        script.write_text(text)
        code, answer = ask(script)
        assert code == 2, answer
        assert "Not examined: " in answer
        assert reason in answer
    code, answer = ask(ROOT / "00_single_gpu" / "train.py", *LEVEL)
    assert code == 2
    assert "Not examined: " in answer


@pytest.mark.long
def test_ranks_that_wait_before_their_group_are_found(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import time\n\ntime.sleep(60)\n")
    code, text = ask("--time-out", 6, script)
    assert code == 1
    assert "no rank got on for 6 s: rank 0 is in waits.py:3" in text


@pytest.mark.slow
def test_a_script_is_ended_after_some_steps(tmp_path):
    code, text = ask("--steps", 3, "--verbose", HEALTHY, "--out", tmp_path)
    assert code == 0, text
    assert "healthy.py on 2 processes (gloo): 3 optimizer steps" in text
    assert "it was ended after 3 optimizer steps" in text


@pytest.mark.slow
def test_a_script_may_have_a_module_that_is_named_as_this_repositorys(tmp_path):
    (tmp_path / "common.py").write_text("print('its own common')\n")
    script = tmp_path / "train.py"
    script.write_text("import common\n")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, watched.__file__, str(tmp_path), "0", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "its own common\n", done.stderr


def test_a_script_that_is_not_there_is_an_error(capsys):
    with pytest.raises(UserError):
        program.main(["nowhere.py"])
    assert capsys.readouterr().err == "error: there is no file nowhere.py\n"
