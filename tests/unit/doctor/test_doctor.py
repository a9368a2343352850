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
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from common import ladder, pitfalls
from common.doctor import __main__ as program
from common.doctor import checks, launch, record, report, run_script
from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks import end, optimizers, random_numbers, replicas, samples, steps
from common.doctor.observers import end_after
from common.doctor.observers.clipping import ClippingObserver
from common.doctor.observers.heartbeat import script_line
from common.doctor.observers.loaders import contents
from common.doctor.observers.optimizers import OptimizerObserver
from common.doctor.record import Draw, End, Epoch, Network, Record, Step
from common.errors import UserError
from common.processes import Ranks, ranks

PATIENTS = Path(__file__).with_name("patients")
HEALTHY = PATIENTS / "healthy.py"
AILING = PATIENTS / "ailing.py"

# For each class of ailing.py the topic of the first finding, the pitfall that it names, and a part of its text.
MISTAKES = {
    "ForgottenWrapper": ("weights", "forward_through_module", ""),
    "ConvertedAfterWrapping": ("weights", "moved_after_wrapping", ""),
    "HeadReplacedAfterTheOptimizer": ("parameters of the optimizer", "replaced_parameters", ""),
    "OptimizerMadeBeforeSharding": ("parameters of the optimizer", "optimizer_made_first", ""),
    "ScheduleOnRank0": ("learning rates", "schedule_on_rank_0", ""),
    "ScheduleTooFast": ("schedule", "schedule_too_fast", "the learning rate is 0 in the last 7 of 16 steps"),
    "AccumulationOffByOne": ("accumulation", "accumulation_off_by_one", "the steps are of 1, 3, 3, … micro-batches"),
    "ClippedWhileScaled": ("clipping", None, "16 of 16 times gradients were clipped"),
    "NoSampler": ("training samples", "different_orders", ""),
    "SetEpochForgotten": ("order of the epochs", "set_epoch_forgotten", ""),
    "SameDropout": ("random numbers", "same_random_numbers", "forwards in training drew the same numbers"),
    "SameAugmentation": ("random numbers", "same_random_numbers", "batches drew the same numbers"),
    "StreamReadWholeOnEachRank": ("training samples", None, "with the same contents in the same order"),
    "StreamCalledByKeywords": ("training samples", None, "with the same contents in the same order"),
    "PaddedEvaluation": ("evaluation samples", "padded_evaluation", ""),
    "StatisticsOfEachRank": ("BatchNorm's statistics", "batchnorm_statistics", ""),
    "EveryRankSaves": ("files", "every_rank_saves", ""),
    "PrefixedKeys": ("saved keys", "prefixed_keys", ""),
    "DataDrawnAnewOnEachRank": ("data sets", None, "have other contents on another rank"),
}
QUICK, *SLOW = MISTAKES
# What looks like a mistake and is none: a part of the report.
HARMLESS = {
    "StreamSharedOut": "the samples have no numbers",
    "BatchesCutByTheScript": "the script itself cuts each rank's share out of a batch",
    "Sharded": "no rank has whole parameters",
}
# What ends badly, or never: the pitfall, and a part of the report.
ENDS = {
    "CollectiveOnRank0": ("collective_on_rank_0", "all_reduce in ailing.py:"),
    "UnevenInputs": ("uneven_inputs", "in epoch 0 rank 0 has 9 batches, rank 1 has 8 batches"),
    "UnevenEvaluation": ("uneven_evaluation", "in evaluation 0 rank 0 has 6 batches, rank 1 has 5 batches"),
    "UnusedParameter": ("unused_parameter", "gradients of parameters that the forward does not use"),
    "RankThatLeavesItsLoop": (None, "rank 1 has ended"),
}


def examined(script: Path, folder: Path, *flags: object) -> tuple[dict[str, Answer], str]:
    """The doctor's answers and report on a script that runs in forks, which saves the import of torch."""
    pool = Ranks(2, on_cpu=True)  # of its own: the observers stay in it
    try:
        pool.run(run_watched, folder, script, flags or ("--out", folder), timeout=120)
    finally:
        pool.stop()
    records = [record.read(folder / f"rank{rank}" / record.FILE) for rank in range(2)]
    assert not any(one.observer_errors for one in records)
    answers = checks.ask_all(records, patience=60)
    return answers, unwrapped("\n".join(report.lines(answers, records)))


def run_watched(folder: Path, script: Path, flags: tuple) -> None:
    (folder / f"rank{os.environ['RANK']}").mkdir()
    run_script.run(folder, None, script, [str(flag) for flag in flags])


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_a_healthy_script_raises_no_alarm_and_trains_the_weights_that_it_would_alone(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    answers, text = examined(HEALTHY, tmp_path)
    assert "Healthy: nothing found" in text
    right = {topic for topic, answer in answers.items() if answer == Right()}
    assert answers.keys() - right == {"BatchNorm's statistics"}
    ranks(2, on_cpu=True).run(run_alone, HEALTHY, alone)
    weights, expected = (torch.load(folder / "best.pt")["weights"] for folder in (tmp_path, alone))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def run_alone(script: Path, folder: Path) -> None:
    sys.argv = [str(script), "--out", str(folder)]
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_planted_mistake_is_the_first_finding(name, tmp_path):
    expected_topic, pitfall, part = MISTAKES[name]
    answers, text = examined(AILING, tmp_path, name, "--out", tmp_path)
    found = report.findings(answers)
    topic, first = next(iter(found.items()))
    assert (topic, first.pitfall) == (expected_topic, pitfall), text
    assert part in text
    if topic == "learning rates":
        assert "weights" not in found  # they differ because of that


def test_each_pitfall_is_found_in_a_script_or_named_as_one_that_only_its_author_can_see():
    found = {pitfall for _, pitfall, _ in MISTAKES.values()} | {pitfall for pitfall, _ in ENDS.values()}
    found.discard(None)
    assert found.isdisjoint(checks.ONLY_YOU_CAN_SEE)
    assert found.union(checks.ONLY_YOU_CAN_SEE) == set(pitfalls.NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_like_a_mistake_raises_no_alarm(name, tmp_path):
    answers, text = examined(AILING, tmp_path, name, "--out", tmp_path)
    assert report.findings(answers) == {}
    assert HARMLESS[name] in text


def test_weights_that_are_averaged_now_and_then_are_no_finding():
    apart, equal = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])
    records = [Record(rank, networks=[Network("Net", wrapped=True, forwards=4)]) for rank in range(2)]
    for rank, one in enumerate(records):
        one.networks[0].weights = {step: {"w": apart + rank if step % 2 else equal} for step in range(1, 5)}
    assert replicas.check_same_weights(records) == Right()
    for one in records:
        del one.networks[0].weights[2], one.networks[0].weights[4]
    assert isinstance(replicas.check_same_weights(records), Finding)
    for one in records:
        one.networks[0].weights[4] = {"w": torch.tensor([NAN, NAN])}
    assert isinstance(replicas.check_same_weights(records), Finding)


NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    "of_ranks, kind",
    [
        pytest.param([[1.0, 2.0], [NAN, 2.0]], Finding, id="a nan on another rank"),
        pytest.param([[NAN, NAN], [1.0, 2.0]], Finding, id="only nans on rank 0"),
        pytest.param([[NAN, 2.0], [NAN, 3.0]], Finding, id="a nan on both, and another number"),
        pytest.param([[INF, 2.0], [INF, 3.0]], Finding, id="an infinity on both, and another number"),
        pytest.param([[INF, 2.0], [-INF, 2.0]], Finding, id="two infinities"),
        pytest.param([[NAN, INF], [NAN, INF]], Right, id="the same on both"),
    ],
)
def test_ranks_differ_in_what_is_not_finite_too(of_ranks, kind):
    records = [Record(rank, networks=[Network("Net", wrapped=True, forwards=1)]) for rank in range(2)]
    for one, values in zip(records, of_ranks, strict=True):
        one.networks[0].weights = {1: {"w": torch.tensor(values)}}
        one.networks[0].statistics = {1: {"mean": torch.tensor(values)}}
    assert isinstance(replicas.check_same_weights(records), kind)
    assert isinstance(replicas.check_same_statistics(records), kind)


@pytest.mark.parametrize("rates, kind", [((NAN, NAN), Right), ((0.1, NAN), Finding), ((NAN, 0.1), Finding)])
def test_a_learning_rate_that_is_no_number_differs_from_one_that_is(rates, kind):
    records = [Record(rank, steps=[Step([float(str(rate))], 1)]) for rank, rate in enumerate(rates)]
    assert isinstance(optimizers.check_learning_rates(records), kind)


def read_by(orders: list[list[int]], contents: list[list[int]]) -> list[Record]:
    """Records of ranks that read these numbers of a data set of 1,000, in batches of 4, and contents with them."""
    records = []
    for rank, (numbers, of_rank) in enumerate(zip(orders, contents, strict=True)):
        one = Epoch(0, 1000, True, samples=numbers, batches=len(numbers) // 4, last_batch=4, forwards=9)
        one.contents = [(content, int(content % 20 == 0)) for content in of_rank]  # a rare label
        records.append(Record(rank, epochs=[one]))
    return records


def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


LAP = shuffled(1000, 0)
HALVES = [LAP[::2], LAP[1::2]]
OWN = [shuffled(1000, rank) for rank in range(2)]
DRAWN = torch.randint(1000, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
DRAWN[1][0] = DRAWN[0][0]


@pytest.mark.parametrize(
    "records, kind, pitfall",
    [
        pytest.param(read_by(HALVES, HALVES), Right, None, id="dealt out"),
        pytest.param(read_by(OWN, OWN), Finding, "different_orders", id="an order for each rank"),
        pytest.param(read_by([LAP, LAP], [LAP, LAP]), Finding, None, id="one order for all ranks"),
        pytest.param(read_by([LAP[:12]] * 2, [LAP[:12]] * 2), Finding, None, id="a few, in one order"),
        pytest.param(read_by([LAP, OWN[1]], [LAP, range(2000, 3000)]), NotExamined, None, id="other data sets"),
        pytest.param(read_by(DRAWN, DRAWN), NotExamined, None, id="drawn with weights"),
    ],
)
def test_training_samples(records, kind, pitfall):
    answer = samples.check_training_samples(records)
    assert isinstance(answer, kind), answer
    assert getattr(answer, "pitfall", None) == pitfall


def drawn(rank: int, epoch: int, kind: str) -> list[tuple[int, ...]]:
    """The contents of the samples 0 to 99, of three tensors each."""
    if kind == "augmented":
        return [(1000 * rank + 100 * epoch + sample, sample % 7, 0) for sample in range(100)]
    if kind == "new":
        return [(1000 * rank + 100 * epoch + sample, (sample + rank + epoch) % 7, 0) for sample in range(100)]
    return [(1000 * rank + sample, int(sample % 20 == rank), 0) for sample in range(100)]  # with a rare label


@pytest.mark.parametrize("kind, expected", [("of each rank", Finding), ("augmented", Right), ("new", NotExamined)])
def test_numbers_that_are_dealt_out_are_one_sample_on_all_ranks(kind, expected):
    records = [Record(rank) for rank in range(2)]
    for epoch in range(4):
        order = shuffled(100, epoch)
        for one in records:
            own = order[one.rank :: 2]
            of_rank = Epoch(0, 100, True, samples=own, batches=12, last_batch=2, forwards=12)
            of_rank.contents = [drawn(one.rank, epoch, kind)[sample] for sample in own]
            one.epochs.append(of_rank)
    answer = samples.check_data_sets(records)
    assert isinstance(answer, expected), answer


def test_a_text_is_the_same_however_far_it_is_filled_up():
    alone = contents(torch.tensor([[5, 6, 7, 8]]))
    padded = contents({"words": torch.tensor([[5, 6, 7, 8, 0, 0], [3, 1, 4, 5, 9, 2]])})
    assert alone[0] == padded[0]
    assert alone[0] != padded[1]


@pytest.mark.parametrize("of_ranks, kind", [((1, 2, 2), Finding), ((1, 1, 2), Finding), ((1, 2, 3), Right)])
def test_no_two_ranks_draw_alike(of_ranks, kind):
    records = [Record(rank, draws=[Draw("batches", "torch", state)]) for rank, state in enumerate(of_ranks)]
    assert isinstance(random_numbers.check_draws(records), kind)


@pytest.mark.parametrize("folder, line", [(f"{ladder.ROOT}/common", None), (f"{ladder.ROOT}/common2", "train.py:1")])
def test_only_what_is_in_a_librarys_folder_is_of_the_library(folder, line):
    frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=f"{folder}/train.py"), f_lineno=1, f_back=None)
    assert script_line(frame, Path("other.py")) == line


LOST = End("crash", "RuntimeError", "closed by peer", time=2)


@pytest.mark.parametrize(
    "of_rank_0, of_rank_1, found",
    [
        (LOST, End("crash", "ValueError", "no disk", "t.py:9", time=3), "rank 1 crashed after 0 optimizer steps: t.py"),
        (LOST, End("crash", "RuntimeError", "no disk", time=1), "rank 1 crashed after 0 optimizer steps: Runtime"),
        (LOST, End("finished", time=1), "rank 0 was left alone (RuntimeError: closed by peer), rank 1 has ended"),
        (LOST, End("crash", "SIGABRT", "gloo"), "rank 0 was left alone (RuntimeError: closed by peer), rank 1 was"),
        (End("stopped", line="t.py:7"), End("crash", "SIGKILL"), "rank 1 crashed after 0 optimizer steps: SIGKILL"),
        (End("stopped", line="t.py:7"), End("stopped"), "no rank made progress for 60 s: rank 0 is in t.py:7, rank 1"),
    ],
)
def test_an_end_is_explained_by_the_rank_that_did_not_lose_another_one(of_rank_0, of_rank_1, found):
    answer = end.check_end([Record(0, end=of_rank_0), Record(1, end=of_rank_1)], patience=60)
    assert answer.text.startswith(found)


def ask(*arguments: object) -> tuple[int, str]:
    """The doctor's exit code and report, from this process, which has imported torch already."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = program.main([*map(str, arguments)])
    return code, unwrapped(out.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_bad_end_is_explained(name, tmp_path):
    pitfall, part = ENDS[name]
    code, text = ask("--time-out", 12, AILING, name, "--out", tmp_path)
    assert code == 1, text
    assert text.index("FOUND end of the script: ") == text.index("FOUND")
    assert part in text
    assert pitfall is None or f"`python -m common.pitfalls {pitfall}`" in text


@pytest.mark.slow
def test_ctrl_c_ends_the_doctor_in_one_line_and_all_of_its_processes(tmp_path):
    script = tmp_path / "endless.py"
    note = "open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid()))"
    script.write_text(f"import os, sys, time\n{note}\ntime.sleep(300)\n")
    command = [sys.executable, "-m", "common.doctor", script, f"{tmp_path}/pid"]
    doctor = subprocess.Popen(command, cwd=ladder.ROOT, stderr=subprocess.PIPE, text=True)
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


def test_the_group_of_a_rank_that_has_ended_is_signalled_once(monkeypatch):
    signalled = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signalled.append((pid, number)))
    ended = subprocess.Popen(["true"])
    launch._wait([ended], [Path("nowhere")], patience=60)
    assert launch._stop([ended]) == []
    assert signalled == [(ended.pid, signal.SIGKILL)]


def test_an_optimizer_without_a_learning_rate_is_followed_to_the_last_step(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    recorder = SimpleNamespace(record=Record(rank=0), finish=ended.append)
    observer = OptimizerObserver(recorder, SimpleNamespace(networks={}))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    for _ in range(2):
        observer.before_step(optimizer, (), {})
        observer.after_step(optimizer, (), {})
        end_after(2, recorder, optimizer, (), {})
    assert ended == ["steps", 0]
    assert optimizers.check_learning_rates([recorder.record, recorder.record]) == Right()


@pytest.mark.parametrize(
    "arguments, calls, kind",
    [
        pytest.param(("cpu",), ["scale", "unscale_"], Right, id="divided before"),
        pytest.param(("cpu",), ["scale"], Finding, id="not divided"),
        pytest.param(("cpu",), ["scale", "step"], Right, id="of the step before"),
        pytest.param(("cpu", 2.0**16, 2.0, 0.5, 2000, False), ["scale"], Right, id="never multiplied"),
    ],
)
def test_gradients_are_clipped_at_their_own_scale(arguments, calls, kind):
    recorder = SimpleNamespace(record=Record(rank=0))
    observer = ClippingObserver(recorder)
    scaler = torch.amp.GradScaler(*arguments)
    observer.after_init(None, scaler, *arguments)
    for call in calls:
        if call == "scale":
            observer.after_scale(None, scaler, torch.ones(1))
        else:
            observer.before_division(scaler)
    observer.before_clipping()
    assert isinstance(steps.check_clipping([recorder.record]), kind)


@pytest.mark.parametrize(
    "micro_batches, kind",
    [([1, 3, 3, 2], Finding), ([3, 3, 3, 2], Right), ([1, 1, 1, 1], Right), ([1, 3], NotExamined)],
)
def test_the_first_window_of_accumulation_is_as_long_as_the_next(micro_batches, kind):
    steps_of = [Step([0.1], count) for count in micro_batches]
    first = Record(0, steps=steps_of, networks=[Network("Net", forwards=12)])
    assert isinstance(steps.check_accumulation([first]), kind)


@pytest.mark.parametrize(
    "rates, kind", [([0.3, 0.2, 0.1, 0.0], Right), ([0.1, 0.0, 0.0, 0.0], Finding), ([0.1, 0.1, 0.1], NotExamined)]
)
def test_a_schedule_lasts_as_long_as_the_training(rates, kind):
    assert isinstance(steps.check_schedule([Record(0, steps=[Step([rate], 1) for rate in rates])]), kind)


def test_where_an_observer_failed_nothing_is_called_healthy():
    watched = Record(rank=0, observer_errors=["ValueError: a rate"])
    assert "Healthy" not in "\n".join(report.lines({"weights": Right()}, [watched]))
    assert "Healthy" in "\n".join(report.lines({"weights": Right()}, [Record(rank=0)]))


LEVEL = ["--dataset", "synthetic", "--train-samples", "250", "--eval-samples", "101", "--batch-size", "96"]
TEMPLATE = ["--arch", "squeezenet1_1", "--size", "32", "--epochs", "2", "--batch-size", "8", "--workers", "1"]
OURS = {
    "02_ddp_raw/train.py": [*LEVEL, "--epochs", "2"],
    "03_accelerate/train_full.py": [*LEVEL, "--epochs", "2", "--gradient-accumulation-steps", "2"],
    "04_trainer/train_full.py": [*LEVEL, "--epochs", "2", "--gradient-accumulation-steps", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", OURS)
def test_our_own_scripts_are_healthy(script, tmp_path):
    answers, text = examined(ladder.ROOT / script, tmp_path, *OURS[script])
    assert report.findings(answers) == {}
    assert "Healthy: " in text


@pytest.mark.long
@pytest.mark.parametrize("level", ["02_ddp_raw", "03_accelerate", "04_trainer"])
def test_the_templates_are_healthy(level, tmp_path):
    for split, count in {"train": 25, "val": 9}.items():
        for brightness in (60, 120):
            folder = tmp_path / split / str(brightness)
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40, 48), (brightness, number, 9 * number)).save(folder / f"{number}.png")
    code, text = ask(ladder.ROOT / level / "template.py", tmp_path, *TEMPLATE, "--checkpoint", tmp_path / "run")
    assert code == 0, text
    assert "Healthy: nothing found" in text


def test_without_a_process_group_only_a_bad_end_is_examined():
    step = Step([0.1], 1)
    for expected, state in (
        ("the script printed last: no training", {"end": End("finished"), "last_printed": "no training"}),
        ("the script made no process group", {"end": End("finished"), "steps": [step]}),
        ("None", {"end": End("stopped", line="train.py:3")}),
        ("None", {"end": End("crash", "ValueError"), "steps": [step]}),
    ):
        records = [Record(rank, **state) for rank in range(2)]
        reason = checks.why_nothing_was_examined(records, checks.ask_all(records, patience=60))
        assert expected in str(reason)


@pytest.mark.slow
def test_a_script_that_starts_its_own_processes_is_not_examined(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch.multiprocessing as mp\n\nmp.spawn(print, nprocs=2)\n")
    code, text = ask(script)
    assert code == 2, text
    assert "Nothing was examined: " in text
    assert "the script starts its own processes with torch.multiprocessing" in text


@pytest.mark.slow
def test_a_script_is_ended_after_some_steps(tmp_path):
    code, text = ask("--steps", 3, HEALTHY, "--out", tmp_path)
    assert code == 0, text
    assert "healthy.py on 2 processes (gloo): 3 optimizer steps" in text


@pytest.mark.slow
def test_a_script_may_have_a_module_that_is_named_as_this_repositorys(tmp_path):
    (tmp_path / "common.py").write_text("print('its own common')\n")
    script = tmp_path / "train.py"
    script.write_text("import common\n")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, run_script.__file__, str(tmp_path), "None", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "its own common\n", done.stderr


def test_a_script_that_is_not_there_is_an_error(capsys):
    with pytest.raises(UserError):
        program.main(["nowhere.py"])
    assert capsys.readouterr().err == "error: there is no file nowhere.py\n"
