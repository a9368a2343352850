"""What is changed in the healthy script: mistakes, what looks like one, and ends that nobody wants."""

from typing import NamedTuple

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


class Planted(NamedTuple):
    """What is exchanged in the healthy script, and the first finding that it then has."""

    changes: dict[str, str]
    topic: str
    pitfall: str | None = None
    text: str = ""  # of the report


MISTAKES = {
    "forgotten wrapper": Planted(
        {WRAP: "self.model = self.net", "self.model.module": "self.model"}, "weights", "forward_through_module"
    ),
    "converted after wrapping": Planted(
        {WRAP: f"{WRAP}.to(torch.float64)", 'batch["x"])': 'batch["x"].double())'}, "weights", "moved_after_wrapping"
    ),
    "head exchanged after the optimizer": Planted(
        {
            WRAP: f"old = list(self.net.parameters()); self.net.head = nn.Linear(16, 2); {WRAP}",
            "optim.Adam(self.model.parameters()": "optim.Adam(old",
        },
        "parameters of the optimizer",
        "replaced_parameters",
    ),
    "schedule on rank 0": Planted(
        {SCHEDULE: "            if self.is_chief:\n                self.sched.step()\n"},
        "learning rates",
        "schedule_on_rank_0",
    ),
    "schedule too fast": Planted(
        {
            SCHEDULE: "            for _ in range(self.world):\n                self.sched.step()\n",
            "1.0 - step / (steps + 1)": "max(0.0, 1.0 - step / (steps + 1))",
        },
        "schedule",
        "schedule_too_fast",
    ),
    "accumulation off by one": Planted(
        {
            "for batch in self.train_loader": "for number, batch in enumerate(self.train_loader)",
            STEP: "            if number % 3 == 0:\n                self.opt.step()\n",
            ZERO: "            if number % 3 == 1:\n                self.opt.zero_grad()\n",
        },
        "accumulation",
        "accumulation_off_by_one",
    ),
    "no sampler": Planted({"sampler=self.sampler": "shuffle=True"}, "training samples", "different_orders"),
    "set_epoch forgotten": Planted({SET_EPOCH: ""}, "order of the epochs", "set_epoch_forgotten"),
    "same dropout": Planted({SEED: "self.seed_everything(opts.seed)"}, "random numbers", "same_random_numbers"),
    "an iterable data set that each rank reads whole": Planted(
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
    "padded evaluation": Planted(
        {"sampler=EveryNth(self.valid_set, self.rank, self.world)": "sampler=DistributedSampler(self.valid_set)"},
        "evaluation samples",
        "padded_evaluation",
    ),
    "statistics of each rank": Planted(
        {"nn.LayerNorm(width)": "nn.BatchNorm1d(width)"}, "BatchNorm's statistics", "batchnorm_statistics"
    ),
    "every rank saves": Planted(
        {"        if self.is_chief:\n            target": "        if True:\n            target"},
        "files",
        "every_rank_saves",
    ),
    "prefixed keys": Planted(
        {"self.model.module.state_dict()": "self.model.state_dict()"}, "saved keys", "prefixed_keys"
    ),
    # No pitfall shows these.
    "data drawn anew on each rank": Planted(
        {"Circles(opts.samples, seed=1,": "Circles(opts.samples, seed=1 + self.rank,"},
        "data sets",
        text="have other contents on another rank",
    ),
    "weights loaded on one rank": Planted(
        {
            WRAP: f"{WRAP}\n        torch.manual_seed(5 + self.rank)\n        if self.is_chief:\n"
            "            self.net.load_state_dict(Net().state_dict())"
        },
        "weights",
        text="before the first step, though DistributedDataParallel holds the network",
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
}
END = "end of the script"
# These end badly, or never.
ENDS = {
    "collective on rank 0": Planted(
        {REDUCE: "            if self.is_chief:\n                torch.distributed.all_reduce(running)\n"},
        END,
        "collective_on_rank_0",
        "all_reduce in patient.py:",
    ),
    "uneven inputs": Planted(
        {SAMPLER: "EveryNth(self.train_set, self.rank, self.world)", SET_EPOCH: "", "default=256": "default=257"},
        END,
        "uneven_inputs",
        "of the batches of epoch 0 rank 0 has 9, rank 1 has 8",
    ),
    "unused parameter": Planted(
        {"self.head = nn.Linear(width, 2)": "self.head = nn.Linear(width, 2); self.spare = nn.Linear(width, 2)"},
        END,
        "unused_parameter",
        "2 of 8 parameters, which the forward does not use (spare.weight, spare.bias)",
    ),
    "a rank that leaves its loop": Planted(
        {"            self.sampler.set_epoch(epoch)\n": "            if self.rank and epoch:\n                break\n"},
        END,
        text="rank 1 has ended",
    ),
}
