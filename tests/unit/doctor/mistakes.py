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
    text: str = ""  # of the report: of the finding, or why it is so


BACKWARD = "            loss.backward()\n"
SUM = "            for p in self.net.parameters():\n                torch.distributed.all_reduce(p.grad)\n"
MISTAKES = {
    "forgotten wrapper": Planted(
        {WRAP: "self.model = self.net", "self.model.module": "self.model"}, "weights", "forward_through_module"
    ),
    "forward past the wrapper": Planted(
        {FORWARD: 'self.model.module(batch["x"])'}, "weights", "forward_through_module"
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
    "the same order on all ranks": Planted(
        {SAMPLER: "DistributedSampler(self.train_set, 1, 0, shuffle=True, seed=opts.seed)"}, "training samples", None
    ),
    "an order for each rank": Planted(
        {SAMPLER: f"{SAMPLER[:-1]} + self.rank)"}, "training samples", "different_orders"
    ),
    "set_epoch forgotten": Planted({SET_EPOCH: ""}, "order of the epochs", "set_epoch_forgotten"),
    "same dropout": Planted({SEED: "self.seed_everything(opts.seed)"}, "random numbers", "same_random_numbers"),
    "same augmentation": Planted(
        {SEED: "torch.manual_seed(opts.seed + self.rank)"}, "random numbers", "same_random_numbers"
    ),
    "a data set ordered by each rank": Planted(
        {
            "jitter=0.01)\n": "jitter=0.0)\n        self.train_set.points = self.train_set.points["
            "torch.randperm(256, generator=torch.Generator().manual_seed(self.rank))]\n"
        },
        "training samples",
        "different_orders",
    ),
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
    # No page of the lab has these.
    "weights loaded on one rank": Planted(
        {
            WRAP: f"{WRAP}\n        torch.manual_seed(5 + self.rank)\n        if self.is_chief:\n"
            "            self.net.load_state_dict(Net().state_dict())"
        },
        "weights",
        text="before the first step, though DistributedDataParallel holds the network",
    ),
    "fewer parameters in one optimizer": Planted(
        {"optim.Adam(self.model.parameters()": "optim.Adam(list(self.model.parameters())[: 6 - 2 * self.rank]"},
        "weights",
        text="after step 1; the number of parameters in optimizers is 6 on rank 0, 4 on rank 1",
    ),
    "updates that nobody knows of": Planted(
        {STEP: f"{STEP}            self.net.head.bias.data += self.rank\n"},
        "weights",
        text="rank 0 and 1 differ in 1 of 6 tensors by up to 1.0e+00 (head.bias) after step 1. "
        "Why: the doctor has seen that it is so, and not what causes it",
    ),
    "a learning rate for each rank": Planted(
        {"lr=opts.lr)": "lr=opts.lr * (1 + self.rank))"},
        "learning rates",
        text="differ at 16 of 16 steps; at step 1 rank 0 has 0.003, rank 1 has 0.006",
    ),
    "a schedule that is faster on one rank": Planted(
        {SCHEDULE: "            for _ in range(1 + self.rank):\n                self.sched.step()\n"},
        "learning rates",
        text="rank 1 has 0.00265",
    ),
    "gradients summed after DDP": Planted(
        {BACKWARD: BACKWARD + SUM},
        "averages of gradients",
        text="12 gradients that DistributedDataParallel had averaged went into an all_reduce of the script",
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
        text="rank 1 has ended; rank 1 left the training after 8 forwards, and rank 0 had begun forward 9",
    ),
    "a rank that leaves its loop for an evaluation": Planted(
        {
            "for batch in self.train_loader": "for number, batch in enumerate(self.train_loader)",
            "            self.opt.zero_grad()\n": "            if self.rank and number == 5:\n                break\n"
            "            self.opt.zero_grad()\n",
        },
        END,
        text="rank 1 left the training after 5 forwards, and rank 0 had begun forward 6",
    ),
    "deadlock": Planted(
        {REDUCE: "            torch.distributed.recv(running, 1 - self.rank)\n"},
        END,
        text="no rank got on for 12 s: rank 0 is in patient.py:103 (recv), rank 1 is in patient.py:103 (recv)",
    ),
    "crash": Planted(
        {REDUCE: "            if not self.is_chief:\n                raise ValueError('no disk')\n" + REDUCE},
        END,
        text="rank 1 crashed after 8 optimizer steps: patient.py:",
    ),
}
