"""The doctor on a script that knows nothing of this repository: healthy, and with one mistake of the lab at a time."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from common.doctor import __main__ as program
from common.doctor import (
    compare_calls,
    compare_contents,
    compare_data,
    compare_models,
    launch,
    record,
    report,
    watch_data,
    watched,
)
from common.doctor.answers import Finding, Healthy, Unseen
from common.doctor.launch import Rank
from common.doctor.record import Model, Pass, Record
from common.doctor.watch_schedulers import SchedulerWatch
from common.errors import UserError
from common.pitfalls import NAMES
from common.processes import Ranks

ROOT = Path(__file__).parents[3]
HEALTHY = Path(__file__).with_name("patients") / "healthy.py"

WRAP = "self.model = DDP(self.net)"
FORWARD = 'self.model(batch["x"])'
SET_EPOCH = "            self.sampler.set_epoch(epoch)\n"
SCHEDULE = "            self.sched.step()\n"
STEP = "            self.opt.step()\n"
ZERO = "            self.opt.zero_grad()\n"
SEED = "self.seed_everything(opts.seed + self.rank)"
SAMPLER = "DistributedSampler(self.train_set, self.world, self.rank, shuffle=True, seed=opts.seed)"
REDUCE = "            torch.distributed.all_reduce(running)\n"
STREAM = """class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples, first=0, step=1):
        self.samples, self.mine = samples, range(first, len(samples), step)

    def __iter__(self):
        return (self.samples[i] for i in self.mine)


class EveryNth"""
# What is exchanged in the healthy script, and the topic and the pitfall that the first finding then has.
MISTAKES = {
    "forgotten wrapper": (
        {WRAP: "self.model = self.net", "self.model.module": "self.model"},
        "weights",
        "forward_through_module",
    ),
    "forward past the wrapper": (
        {FORWARD: 'self.model.module(batch["x"])'},
        "weights",
        "forward_through_module",
    ),
    "converted after wrapping": (
        {WRAP: f"{WRAP}.to(torch.float64)", 'batch["x"])': 'batch["x"].double())'},
        "weights",
        "moved_after_wrapping",
    ),
    "head exchanged after the optimizer": (
        {
            WRAP: f"old = list(self.net.parameters()); self.net.head = nn.Linear(16, 2); {WRAP}",
            "optim.Adam(self.model.parameters()": "optim.Adam(old",
        },
        "parameters of the optimizer",
        "replaced_parameters",
    ),
    "schedule on rank 0": (
        {SCHEDULE: "            if self.is_chief:\n                self.sched.step()\n"},
        "learning rates",
        "schedule_on_rank_0",
    ),
    "schedule too fast": (
        {
            SCHEDULE: "            for _ in range(self.world):\n                self.sched.step()\n",
            "1.0 - step / (steps + 1)": "max(0.0, 1.0 - step / (steps + 1))",
        },
        "schedule",
        "schedule_too_fast",
    ),
    "accumulation off by one": (
        {
            "for batch in self.train_loader": "for number, batch in enumerate(self.train_loader)",
            STEP: "            if number % 3 == 0:\n                self.opt.step()\n",
            ZERO: "            if number % 3 == 1:\n                self.opt.zero_grad()\n",
        },
        "accumulation",
        "accumulation_off_by_one",
    ),
    "no sampler": ({"sampler=self.sampler": "shuffle=True"}, "training samples", "different_orders"),
    "the same order on all ranks": (
        {SAMPLER: "DistributedSampler(self.train_set, 1, 0, shuffle=True, seed=opts.seed)"},
        "training samples",
        None,
    ),
    "an order for each rank": ({SAMPLER: f"{SAMPLER[:-1]} + self.rank)"}, "training samples", "different_orders"),
    "set_epoch forgotten": ({SET_EPOCH: ""}, "order of the epochs", "set_epoch_forgotten"),
    "same dropout": ({SEED: "self.seed_everything(opts.seed)"}, "random numbers", "same_random_numbers"),
    "same augmentation": ({SEED: "torch.manual_seed(opts.seed + self.rank)"}, "random numbers", "same_random_numbers"),
    "a data set ordered by each rank": (
        {
            "jitter=0.01)\n": "jitter=0.0)\n        self.train_set.points = self.train_set.points["
            "torch.randperm(256, generator=torch.Generator().manual_seed(self.rank))]\n"
        },
        "training samples",
        "different_orders",
    ),
    "an iterable data set that each rank reads whole": (
        {
            "DataLoader(self.train_set, opts.bs, sampler=self.sampler)": "DataLoader(Stream(self.train_set), opts.bs)",
            SET_EPOCH: "",
            "len(self.train_loader)": "16",
            "class EveryNth": STREAM,
            "jitter=0.01)": "jitter=0.0)",
        },
        "training samples",
        None,
    ),
    "a data set ordered by each rank, one epoch": (
        {
            "jitter=0.01)\n": "jitter=0.0)\n        self.train_set.points = self.train_set.points["
            "torch.randperm(256, generator=torch.Generator().manual_seed(self.rank))]\n",
            '"--epochs", type=int, default=2': '"--epochs", type=int, default=1',
        },
        "training samples",
        "different_orders",
    ),
    "padded evaluation": (
        {"sampler=EveryNth(self.valid_set, self.rank, self.world)": "sampler=DistributedSampler(self.valid_set)"},
        "evaluation samples",
        "padded_evaluation",
    ),
    "statistics of each rank": (
        {"nn.LayerNorm(width)": "nn.BatchNorm1d(width)"},
        "BatchNorm's statistics",
        "batchnorm_statistics",
    ),
    "every rank saves": (
        {"        if self.is_chief:\n            target": "        if True:\n            target"},
        "files",
        "every_rank_saves",
    ),
    "prefixed keys": ({"self.model.module.state_dict()": "self.model.state_dict()"}, "saved keys", "prefixed_keys"),
}
QUICK, *SLOW = MISTAKES
BACKWARD = "            loss.backward()\n"
SUM = "            for p in self.net.parameters():\n                torch.distributed.all_reduce(p.grad)\n"
# Mistakes that no page of the lab has. After the topic: what is said of it, and why.
SEEN = {
    "weights loaded on one rank": (
        {
            WRAP: f"{WRAP}\n        torch.manual_seed(5 + self.rank)\n        if self.is_chief:\n"
            "            self.net.load_state_dict(Net().state_dict())"
        },
        "weights",
        "by up to 1.3e+00 before the first step, though DistributedDataParallel holds the network",
        "The replicas began with different weights",
    ),
    "fewer parameters in one optimizer": (
        {"optim.Adam(self.model.parameters()": "optim.Adam(list(self.model.parameters())[: 6 - 2 * self.rank]"},
        "weights",
        "after step 1; optimizers hold 6 parameters on rank 0 and 4 on rank 1",
        "The ranks do not update the same parameters.",
    ),
    "updates that nobody knows of": (
        {STEP: f"{STEP}            self.net.head.bias.data += self.rank\n"},
        "weights",
        "rank 0 and 1 differ in 1 of 6 tensors by up to 1.0e+00 after step 1",
        "the doctor has seen that it is so, and not what causes it",
    ),
    "a learning rate for each rank": (
        {"lr=opts.lr)": "lr=opts.lr * (1 + self.rank))"},
        "learning rates",
        "differ at 16 of 16 steps; at step 1 rank 0 has 0.003, rank 1 has 0.006",
        "Equal gradients and unequal learning rates make unequal steps.",
    ),
    "a schedule that is faster on one rank": (
        {SCHEDULE: "            for _ in range(1 + self.rank):\n                self.sched.step()\n"},
        "learning rates",
        "rank 1 has 0.00265; the calls of a scheduler's step were 1 on rank 0, 2 on rank 1",
        "The schedulers stepped more often on some ranks than on others.",
    ),
    "gradients summed after DDP": (
        {BACKWARD: BACKWARD + SUM},
        "averages of gradients",
        "12 gradients that DistributedDataParallel had averaged went into an all_reduce of the script, and came back 2",
        "DistributedDataParallel averages in backward",
    ),
}
# What looks like a mistake, and is none.
HARMLESS = {
    "an iterable data set of which each rank reads a part": (
        {
            "DataLoader(self.train_set, opts.bs, sampler=self.sampler)": (
                "DataLoader(Stream(self.train_set, self.rank, self.world), opts.bs)"
            ),
            SET_EPOCH: "",
            "len(self.train_loader)": "8",
            "class EveryNth": STREAM,
        },
        "the samples have no numbers",
    ),
    "batches that the script cuts itself": (
        {
            "sampler=self.sampler": "shuffle=True, generator=torch.Generator().manual_seed(1)",
            SET_EPOCH: "",
            FORWARD: 'self.model(batch["x"][self.rank :: self.world])',
            'batch["y"])\n            loss.b': 'batch["y"][self.rank :: self.world])\n            loss.b',
        },
        "the script itself cuts each rank's share out of a batch",
    ),
    "gradients summed after DDP, and divided": (
        {BACKWARD: BACKWARD + SUM + "                p.grad /= self.world\n"},
        "in the first steps 12 went into an all_reduce of the script: none is multiplied",
    ),
    "gradients summed in place of DDP": (
        {
            "            loss = self.criterion(": "            with self.model.no_sync(): loss = self.criterion(",
            BACKWARD: BACKWARD + SUM + "                p.grad /= self.world\n",
        },
        "in the first steps 12 went into an all_reduce of the script: none is multiplied",
    ),
}
# These end badly, or never.
ENDS = {
    "collective on rank 0": (
        {REDUCE: "            if self.is_chief:\n                torch.distributed.all_reduce(running)\n"},
        "collective_on_rank_0",
        "all_reduce in patient.py:",
    ),
    "uneven inputs": (
        {SAMPLER: "EveryNth(self.train_set, self.rank, self.world)", SET_EPOCH: "", "default=256": "default=257"},
        "uneven_inputs",
        "of the batches of epoch 0 rank 0 has 9, rank 1 has 8",
    ),
    "unused parameter": (
        {"self.head = nn.Linear(width, 2)": "self.head = nn.Linear(width, 2); self.spare = nn.Linear(width, 2)"},
        "unused_parameter",
        "2 of 8 parameters, which the forward does not use (spare.weight, spare.bias)",
    ),
    "a rank that leaves its loop": (
        {"            self.sampler.set_epoch(epoch)\n": "            if self.rank and epoch:\n                break\n"},
        None,
        "rank 1 has ended; rank 1 left the training after 8 forwards, and rank 0 had begun forward 9",
    ),
    "a rank that leaves its loop for an evaluation": (
        {
            "for batch in self.train_loader": "for number, batch in enumerate(self.train_loader)",
            "            self.opt.zero_grad()\n": "            if self.rank and number == 5:\n                break\n"
            "            self.opt.zero_grad()\n",
        },
        None,
        "rank 1 left the training after 5 forwards, and rank 0 had begun forward 6",
    ),
    "deadlock": (
        {REDUCE: "            torch.distributed.recv(running, 1 - self.rank)\n"},
        None,
        "no rank got on for 12 s: rank 0 is in patient.py:103 (recv), rank 1 is in patient.py:103 (recv)",
    ),
    "crash": (
        {REDUCE: "            if not self.is_chief:\n                raise ValueError('no disk')\n" + REDUCE},
        None,
        "rank 1 crashed after 8 optimizer steps: patient.py:",
    ),
}


def planted(changes: dict[str, str], folder: Path) -> Path:
    """The healthy script with `changes`."""
    text = HEALTHY.read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "patient.py"
    path.write_text(text)
    return path


def examined(script: Path, folder: Path, *flags: object) -> list:
    """The doctor's answers on a script that runs in forks, which saves the import of torch."""
    pool = Ranks(2, on_cpu=True)  # of its own: the observers stay in it
    try:
        pool.run(run_watched, folder, script, flags or ("--out", folder), timeout=120)
    finally:
        pool.stop()
    records = [record.read(folder / f"rank{rank}.pt") for rank in range(2)]
    assert not any(one.troubles for one in records)
    return report.answers([Rank(one, 0, "", hung=False) for one in records], patience=60)


def run_watched(folder: Path, script: Path, flags: tuple) -> None:
    watched.run(folder, int(os.environ["RANK"]), None, script, [str(flag) for flag in flags])


def findings(answers: list) -> list[Finding]:
    return [answer for answer in answers if isinstance(answer, Finding)]


def assert_healthy(answers: list) -> None:
    assert findings(answers) == []
    assert report.verdict(answers, 2)[0].startswith("Healthy")


def test_a_healthy_script_raises_no_alarm(tmp_path):
    answers = examined(HEALTHY, tmp_path)
    assert_healthy(answers)
    seen = {answer.topic: answer.text for answer in answers}
    assert seen["weights"] == "equal on all ranks, compared after 16 optimizer steps"
    assert seen["evaluation samples"] == "101 of 101, each once"
    assert seen["averages of gradients"] == "in the first steps none went into an all_reduce of the script"


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_planted_mistake_is_the_first_finding(name, tmp_path):
    changes, topic, pitfall = MISTAKES[name]
    answers = examined(planted(changes, tmp_path), tmp_path)
    first, *_ = findings(answers)
    assert (first.topic, first.pitfall) == (topic, pitfall), findings(answers)
    assert any(letter.isdigit() for letter in first.text)
    assert first.pitfall is None or first.pitfall in NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_no_cause_is_named_that_was_not_seen(name, tmp_path):
    changes, topic, text, why = SEEN[name]
    answers = examined(planted(changes, tmp_path), tmp_path)
    first, *_ = findings(answers)
    assert first.topic == topic, findings(answers)
    assert text in first.text
    assert why in report.verdict(answers, 2)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_like_a_mistake_raises_no_alarm(name, tmp_path):
    changes, text = HARMLESS[name]
    answers = examined(planted(changes, tmp_path), tmp_path)
    assert findings(answers) == []
    assert text in {answer.text for answer in answers}


def test_weights_that_are_averaged_now_and_then_are_no_finding():
    apart, equal = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])
    records = [Record(rank, steps=4, models=[Model("Net", wrapped=True, forwards=4)]) for rank in range(2)]
    for rank, one in enumerate(records):
        one.models[0].weights = {step: {"w": apart + rank if step % 2 else equal} for step in range(1, 5)}
    assert isinstance(compare_models.weights(records), Healthy)
    for one in records:
        del one.models[0].weights[2], one.models[0].weights[4]
    finding = compare_models.weights(records)
    assert finding.text.startswith("rank 0 and 1 differ in 1 of 1 tensors by up to 1.0e+00 after step 1")


def epoch_of(samples: range, labels: range) -> Pass:
    """A pass over a data set of 64 samples in batches of 8."""
    contents = [[label] for label in labels]
    read = list(samples)
    return Pass(0, 64, True, "RandomSampler", samples=read, batches=8, last_batch=8, forwards=8, contents=contents)


def test_equal_numbers_in_two_data_sets_are_no_finding():
    """Each rank may have read its own files, which it numbers from 0."""
    passes = [epoch_of(range(64), range(64)), epoch_of(range(64), range(100, 164))]
    own = [Record(rank, passes=[one]) for rank, one in enumerate(passes)]
    unseen = compare_data.shards(own)
    assert isinstance(unseen, Unseen)
    assert "a number has other contents on another rank: a data set of its own" in unseen.text
    twice = [Record(rank, passes=[one, one]) for rank, one in enumerate(passes)]
    assert "each rank has a data set, or an order, of its own" in compare_data.shards(twice).text
    same = [Record(rank, passes=[passes[0]]) for rank in range(2)]
    assert compare_data.shards(same).text == "each rank read the same 64 in the same order in epoch 0"
    turned = epoch_of(range(63, -1, -1), range(63, -1, -1))
    shuffled = [Record(rank, passes=[one]) for rank, one in enumerate((passes[0], turned))]
    assert compare_data.shards(shuffled).pitfall == "different_orders"


def dealt(
    orders: list[list[int]],
    epochs: int,
    changing: bool = False,
    size: int = 64,
    last: int = 4,
    shuffled: bool = True,
    sampler: str = "DistributedSampler",
) -> list[Record]:
    """Records of two ranks that deal out numbers, which stand for other contents in each rank's order."""
    generator = torch.Generator().manual_seed(3)
    records = [Record(rank) for rank in range(2)]
    reads = iter(range(size, 1000 * size))
    for _ in range(epochs):
        numbers = torch.randperm(size, generator=generator).tolist() if shuffled else list(range(size))
        numbers += numbers[: size % 2]
        for record_, order in zip(records, orders, strict=True):
            read = numbers[record_.rank :: 2]
            rows = [[next(reads) if changing else order[number], order[number] % 3] for number in read]
            one = Pass(0, size, True, sampler, samples=read, batches=9, last_batch=last, contents=rows)
            one.forwards = 9
            one.each_once = sampler == "DistributedSampler"
            one.complete = True
            record_.passes.append(one)
    return records


IN_ORDER = list(range(65))
SHUFFLED = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()


def test_no_sample_on_two_ranks_is_said_where_contents_were_compared():
    healthy = compare_data.shards(dealt([IN_ORDER, IN_ORDER], epochs=2))
    assert healthy.text == "no sample on two ranks (56 contents compared); rank by rank 32, 32 in epoch 0"
    once = compare_data.shards(dealt([IN_ORDER, IN_ORDER], epochs=1))
    assert once.text.startswith("no sample on two ranks, by their numbers (contents read once, which may change them);")
    augmented = compare_data.shards(dealt([IN_ORDER, IN_ORDER], epochs=2, changing=True))
    assert augmented.text.startswith(
        "no sample on two ranks, by their numbers (contents shared by several samples, as labels are);"
    )
    doubles = [number // 2 for number in range(64)]
    assert isinstance(compare_data.shards(dealt([doubles, doubles], epochs=2)), Healthy)


def test_a_data_set_in_another_order_on_each_rank_is_found_by_its_contents():
    finding = compare_data.shards(dealt([IN_ORDER, SHUFFLED], epochs=2))
    assert isinstance(finding, Finding)
    assert "were read by several ranks in epoch 0, under another number on each" in finding.text
    augmented = compare_data.shards(dealt([IN_ORDER, SHUFFLED], epochs=2, changing=True))
    assert "a number is another sample on another rank" in augmented.text


LARGE = list(range(300))
LARGE_SHUFFLED = torch.randperm(300, generator=torch.Generator().manual_seed(1)).tolist()


def test_one_epoch_tells_the_same_where_no_rank_read_a_content_twice():
    """Samples that the data set has twice would come to one rank in every second case."""
    finding = compare_data.shards(dealt([LARGE, LARGE_SHUFFLED], epochs=1, size=300))
    assert isinstance(finding, Finding)
    assert finding.pitfall == "different_orders"
    numbers = "without the last batch, 73 of 219 whose contents were compared were read by several ranks in epoch 0"
    assert finding.text == f"{numbers}, under another number on each, and none twice by one rank"


@pytest.mark.parametrize(
    "records",
    [
        dealt([IN_ORDER, SHUFFLED], epochs=1),  # 13 are too few
        dealt([LARGE, LARGE_SHUFFLED], epochs=1, size=300, sampler="SortedByLength"),
        dealt([[number // 2 for number in LARGE]] * 2, epochs=1, size=300, shuffled=False),  # neighbours are apart
    ],
    ids=["too few", "another sampler", "not shuffled"],
)
def test_equal_contents_that_another_cause_may_have_are_no_finding(records):
    answer = compare_data.shards(records)
    assert isinstance(answer, Unseen)
    assert "or each rank has ordered it by itself" in answer.text


def test_samples_that_the_data_set_has_twice_are_no_finding():
    assert isinstance(compare_data.shards(dealt([[n // 2 for n in LARGE]] * 2, epochs=1, size=300)), Healthy)


def read_by(samplers: list[list[int]], name: str = "WeightedSampler") -> list[Record]:
    """Records of ranks that read these numbers of a data set of 1,000, in batches of 4."""
    records = []
    for rank, numbers in enumerate(samplers):
        one = Pass(0, 1000, True, name, samples=numbers, batches=len(numbers) // 4, last_batch=4, forwards=9)
        records.append(Record(rank, passes=[one]))
    return records


def test_a_sampler_that_may_repeat_raises_no_alarm():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1000, (2, 24), generator=generator).tolist()  # a weighted sampler's, of a run ended early
    drawn[1][0] = drawn[0][0]
    assert len(set(drawn[0])) == len(set(drawn[1])) == 24
    answer = compare_data.shards(read_by(drawn))
    assert answer == Unseen(
        "training samples", "1 numbers were read by several ranks, which may be the sampler's chance"
    )
    lap = torch.randperm(1000, generator=generator).tolist()
    endless = lap + torch.randperm(1000, generator=generator).tolist()[:16]  # an infinite sampler has begun anew
    answer = compare_data.shards(read_by([endless[::2], endless[1::2]]))
    assert answer == Unseen("training samples", "the sampler repeats samples")


def test_numbers_on_two_ranks_are_found_whoever_deals_them_out():
    orders = [torch.randperm(1000, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(2)]
    finding = compare_data.shards(read_by([order[:200] for order in orders], "OwnSampler"))
    assert isinstance(finding, Finding)
    assert finding.text.startswith("without the last batch, ")
    same = compare_data.shards(read_by([orders[0][:12]] * 2, "OwnSampler"))
    assert same.text == "each rank read the same 12 in the same order in epoch 0"


def test_a_padded_epoch_is_told_with_what_it_repeats():
    healthy = compare_data.shards(dealt([IN_ORDER, IN_ORDER], epochs=2, size=45, last=3))
    assert isinstance(healthy, Healthy)
    padded = "no sample on two ranks but for a padded end, which repeats 1 of 45 (40 contents compared)"
    assert healthy.text == f"{padded}; rank by rank 23, 23 in epoch 0"


@pytest.mark.parametrize("pad", [0, 1, -100])
def test_a_text_is_the_same_however_far_it_is_filled_up(pad):
    short, long = [5, 6, 7, 8], [3, 1, 4, 5, 9, 2, 6]
    alone = watch_data._contents(torch.tensor([short, short[::-1]]), 2)
    right = watch_data._contents(torch.tensor([short + 3 * [pad], long]), 2)
    left = watch_data._contents({"words": torch.tensor([long, 3 * [pad] + short])}, 2)
    assert alone[0] == right[0]
    assert right[1] == left[0]
    if pad == 0:  # another value is told by the end of a row
        assert left[1] == alone[0]
    assert alone[1] != alone[0]
    sounds = torch.rand(2, 3, 2)
    filled = torch.cat([sounds, torch.zeros(2, 4, 2)], dim=1)
    assert watch_data._contents(sounds, 2) == watch_data._contents(filled, 2)
    classes = watch_data._contents(torch.eye(4), 4)
    assert len({row[0] for row in classes}) == 4


def test_one_changed_read_in_ten_leaves_contents_the_same():
    passes = [Pass(0, 40, True, "Own", samples=list(range(40)), contents=[[n] for n in range(40)]) for _ in range(2)]
    passes[1].contents[3] = [99]
    assert compare_contents.Contents([(one,) for one in passes]).places == [0]
    for number in range(12):
        passes[1].contents[number] = [99 + number]
    assert compare_contents.Contents([(one,) for one in passes]).places == []


def ask_program(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "common.doctor", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def ask(*arguments: object) -> subprocess.CompletedProcess:
    """The same from within this process, which has imported torch already. The script's processes are its own."""
    command = [*map(str, arguments)]
    out = io.StringIO()
    errors = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            program.answer_doctor(program.parse_options(command))
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(command, code, out.getvalue(), errors.getvalue())


def test_no_rank_is_killed_before_all_have_written_where_they_are(tmp_path):
    at_once = "touch rank0.stopped; sleep 60"
    later = "sleep 0.4; kill -0 $FIRST && touch first_was_alive; touch rank1.stopped; sleep 60"
    shell = {"cwd": tmp_path, "start_new_session": True}
    first = subprocess.Popen(["sh", "-c", at_once], **shell)
    second = subprocess.Popen(["sh", "-c", later], env=os.environ | {"FIRST": str(first.pid)}, **shell)
    launch._end([first, second], tmp_path)
    assert (tmp_path / "first_was_alive").exists()
    assert first.returncode == second.returncode == -signal.SIGKILL


# The others end as one of these does: with an error of torch's, or with a rank that waits.
FREQUENT_ENDS = ("collective on rank 0", "a rank that leaves its loop", "crash")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in FREQUENT_ENDS else pytest.mark.long) for name in ENDS]
)
def test_a_bad_end_is_explained(name, tmp_path):
    changes, pitfall, text = ENDS[name]
    patient = planted(changes, tmp_path)
    answer = ask("--time-out", 12, "--json", tmp_path / "answer.json", patient, "--out", tmp_path)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    written = json.loads((tmp_path / "answer.json").read_text())
    first = written["findings"][0]
    assert (first["topic"], first["pitfall"]) == ("end of the script", pitfall), first
    assert text in first["text"]
    assert "gloo/" not in first["text"]
    topics = {answer["topic"] for answer in written["healthy"]}
    assert pitfall != "collective_on_rank_0" or "collectives" not in topics


LEVEL = ["--dataset", "synthetic", "--train-samples", "250", "--eval-samples", "101", "--batch-size", "96"]
TEMPLATE = ["--arch", "squeezenet1_1", "--size", "32", "--epochs", "2", "--batch-size", "8", "--workers", "1"]
OURS = {
    "02_ddp_raw/train.py": [*LEVEL, "--epochs", "2"],
    "03_accelerate/train.py": [*LEVEL, "--epochs", "2"],
    "03_accelerate/train_full.py": [*LEVEL, "--max-steps", "3", "--gradient-accumulation-steps", "2"],
    "04_trainer/train.py": [*LEVEL, "--epochs", "2"],
    "03_accelerate/examples/cifar_resnet18.py": ["--max-steps", "5", "--samples", "160"],
    "03_accelerate/examples/wide_net.py": [
        *("--max-steps", "2", "--batch-size", "16", "--train-samples", "160", "--eval-samples", "50"),
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
    assert_healthy(examined(ROOT / script, tmp_path, *OURS[script], *more))


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
    answer = ask(ROOT / level / "template.py", tmp_path, *TEMPLATE, "--checkpoint", tmp_path / "run")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "\nHealthy: " in answer.stdout


@pytest.mark.parametrize(
    "name", [pytest.param("test_script", marks=pytest.mark.slow), pytest.param("test_sync", marks=pytest.mark.long)]
)
def test_scripts_of_the_original_are_healthy(name, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    answer = ask(Path(accelerate.__file__).parent / "test_utils" / "scripts" / f"{name}.py")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "\nHealthy: " in answer.stdout


@pytest.mark.slow
def test_a_level_that_is_one_process_is_told_so():
    answer = ask_program(ROOT / "00_single_gpu" / "train.py", *LEVEL)
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert "Not examined: the script left before it made a process group" in answer.stdout
    assert "a script of level 00 or 01 is one process" in answer.stdout


@pytest.mark.slow
def test_a_script_without_a_group_and_one_that_is_ended_early(tmp_path):
    group = '    torch.distributed.init_process_group("gloo")\n'
    changes = {group: "", REDUCE: "", "        torch.distributed.all_reduce(counts)\n": ""}
    changes |= {"self.model = DDP(self.net)": "self.model = self.net", "self.model.module": "self.model"}
    changes |= {"    torch.distributed.destroy_process_group()\n": ""}
    answer = ask(planted(changes, tmp_path), "--out", tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "One process: the script made no process group" in answer.stdout
    answer = ask("--steps", 3, HEALTHY, "--out", tmp_path)
    assert "it was ended after 3 optimizer steps" in answer.stdout
    assert "healthy.py on 2 processes (gloo): 3 optimizer steps" in answer.stdout


@pytest.mark.slow
def test_a_script_may_have_modules_that_are_named_as_this_repositorys(tmp_path):
    for name in ("benchmarks", "common"):
        (tmp_path / f"{name}.py").write_text(f"print('the own {name}')\n")
    script = tmp_path / "train.py"
    script.write_text("import benchmarks, common\n")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, watched.__file__, str(tmp_path), "0", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "the own benchmarks\nthe own common\n", done.stderr


@pytest.mark.slow
def test_a_script_that_starts_its_own_processes_is_not_started_twice(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text("import torch.multiprocessing as mp\n\nmp.spawn(print, nprocs=2)\n")
    answer = ask(script)
    assert "Not started: the script starts its own processes" in answer.stdout


@pytest.mark.slow
def test_a_script_that_trains_nothing_is_told_so(tmp_path):
    script = tmp_path / "network.py"
    script.write_text("import torch\n\nnet = torch.nn.Linear(2, 2)\n")
    answer = ask(script)
    assert answer.returncode == 2
    assert "Not examined: the script trained nothing" in answer.stdout
    assert "2 trainings" not in answer.stdout


def test_schedulers_are_counted_as_the_script_steps_them(monkeypatch):
    for scheduler in vars(lr_scheduler).values():
        if isinstance(scheduler, type) and "step" in vars(scheduler):
            monkeypatch.setattr(scheduler, "step", scheduler.step)
    monkeypatch.setattr(LRScheduler, "_initial_step", LRScheduler._initial_step)
    monkeypatch.setattr(LRScheduler, "__init_subclass__", LRScheduler.__init_subclass__)
    record_ = Record(0)
    SchedulerWatch(record_).install()

    class Own(LRScheduler):
        def get_lr(self):
            return [0.5]

        def step(self, epoch=None):
            super().step(epoch)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    schedulers = [lr_scheduler.StepLR(optimizer, 2), Own(optimizer)]
    schedule = lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])
    assert record_.scheduler_steps == 0
    for _ in range(5):
        optimizer.step()
        schedule.step()
    assert record_.scheduler_steps == 5
    schedulers[1].step()
    assert record_.scheduler_steps == 6


def test_collectives_of_a_run_that_broke_off_are_not_called_the_same():
    calls = [("all_reduce", "patient.py:9"), ("barrier", "patient.py:12")]
    broken = [Record(0, ended="crash", collectives=calls), Record(1, ended="whole", collectives=calls[:1])]
    answer = compare_calls.collectives(broken)
    assert answer == Unseen("collectives", "the run broke off with the ranks at different ones of 2")
    other = [Record(0, ended="whole"), Record(1, ended="whole", collectives=calls[:1])]
    assert compare_calls.collectives(other).pitfall is None
    assert compare_calls.collectives(other[::-1]).pitfall == "collective_on_rank_0"
    equal = [Record(rank, ended="crash", collectives=calls) for rank in range(2)]
    assert isinstance(compare_calls.collectives(equal), Healthy)


def test_a_script_that_is_not_there_is_an_error(capsys):
    with pytest.raises(UserError):
        program.answer_doctor(program.parse_options(["nowhere.py"]))
    assert capsys.readouterr().err == "error: there is no file nowhere.py\n"
