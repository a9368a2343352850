"""The doctor on a script that knows nothing of this repository: healthy, and with one mistake of the lab at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.your_network.doctor import record, report, watched
from benchmarks.your_network.doctor.answers import Finding
from benchmarks.your_network.doctor.launch import Rank
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
    "an order for each rank": ({SAMPLER: f"{SAMPLER[:-1]} + self.rank)"}, "training samples", "different_orders"),
    "set_epoch forgotten": ({SET_EPOCH: ""}, "order of the epochs", "set_epoch_forgotten"),
    "same dropout": ({SEED: "self.seed_everything(opts.seed)"}, "random numbers", "same_random_numbers"),
    "same augmentation": ({SEED: "torch.manual_seed(opts.seed + self.rank)"}, "random numbers", "same_random_numbers"),
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
    "deadlock": (
        {REDUCE: "            torch.distributed.recv(running, 1 - self.rank)\n"},
        None,
        "no rank got on for 8 s: rank 0 is in patient.py:104 (recv), rank 1 is in patient.py:104 (recv)",
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


def examined(script: Path, folder: Path) -> list:
    """The doctor's answers on a script that runs in forks, which saves the import of torch."""
    pool = Ranks(2, on_cpu=True)  # of its own: the observers stay in it
    try:
        pool.run(run_watched, folder, script, timeout=60)
    finally:
        pool.stop()
    records = [record.read(folder / f"rank{rank}.pt") for rank in range(2)]
    assert not any(one.troubles for one in records)
    return report.answers([Rank(one, 0, "", hung=False) for one in records], patience=60)


def run_watched(folder: Path, script: Path) -> None:
    import os

    watched.run(folder, int(os.environ["RANK"]), None, script, ["--out", str(folder)])


def findings(answers: list) -> list[Finding]:
    return [answer for answer in answers if isinstance(answer, Finding)]


def test_a_healthy_script_raises_no_alarm(tmp_path):
    answers = examined(HEALTHY, tmp_path)
    assert findings(answers) == []
    seen = {answer.topic: answer.text for answer in answers}
    assert seen["weights"] == "equal on all ranks at 16 of 16 steps"
    assert seen["evaluation samples"] == "101 of 101, each once"
    assert report.verdict(answers, 2)[0].startswith("Healthy")


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_planted_mistake_is_the_first_finding(name, tmp_path):
    changes, topic, pitfall = MISTAKES[name]
    answers = examined(planted(changes, tmp_path), tmp_path)
    first, *_ = findings(answers)
    assert (first.topic, first.pitfall) == (topic, pitfall), findings(answers)
    assert any(letter.isdigit() for letter in first.text)
    assert first.pitfall in NAMES


def ask(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.your_network", "doctor", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_bad_end_is_explained(name, tmp_path):
    changes, pitfall, text = ENDS[name]
    patient = planted(changes, tmp_path)
    answer = ask("--time-out", 8, "--json", tmp_path / "answer.json", patient, "--out", tmp_path)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    written = json.loads((tmp_path / "answer.json").read_text())
    first = written["findings"][0]
    assert (first["topic"], first["pitfall"]) == ("end of the script", pitfall), first
    assert text in first["text"]
