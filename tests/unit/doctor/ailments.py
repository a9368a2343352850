"""Changes to `patient.py`: one mistake each, what only looks like one, and ends that nobody wants."""

from pathlib import Path
from typing import NamedTuple

HEALTHY = Path(__file__).with_name("patient.py")


class Ailment(NamedTuple):
    """Lines of the healthy script, what stands in their place, and what the doctor's report says of it."""

    changes: dict[str, str]
    topic: str | None = None  # that of the first finding; None if there is none
    pitfall: str | None = None  # the one that this finding names
    said: str = ""  # a part of the report


def write(folder: Path, changes: dict[str, str]) -> Path:
    text = HEALTHY.read_text().replace(MAIN, HELPERS + MAIN)
    for old, new in changes.items():
        assert text.count(old) == 1, f"{text.count(old)} times in the healthy script: {old}"
        text = text.replace(old, new)
    script = folder / "train.py"
    script.write_text(text)
    return script


# Lines of the healthy script that are changed in several ways.
TRAIN_SET = "Circles(256, seed=1, jitter=0.01)"
SAMPLER = "sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
LOADER = "DataLoader(train_set, BATCH_SIZE, sampler=sampler)"
NET = "net = Net()\n"
WRAP = "model = DDP(net)"
OPTIMIZER = "opt = optim.Adam(net.parameters(), lr=LR)"
FORWARD = 'criterion(model(batch["x"]), batch["y"])'
STEP = "            opt.step()\n"
SCHEDULE = "            sched.step()\n"
MAIN = "def main(out):\n"

# What changed lines call. It stands in each changed script.
HELPERS = """from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset, random_split


class Stream(IterableDataset):
    def __init__(self, samples, numbers):
        self.samples = samples
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        return (self.samples[i] for i in self.numbers)


def joined(model, loader):
    with Join([model]):
        yield from loader


"""
# Without it an evaluation would leave whole parameters, and saving, on one rank, would part them on this rank alone.
SHARD = """fully_shard(net, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True)
    model = net"""
BATCHNORM = {NET: f"{NET}    net.body[1] = nn.BatchNorm1d(16)\n"}
UNEVEN = {TRAIN_SET: "Circles(257, seed=1)", SAMPLER: "sampler = range(rank, len(train_set), world)", SET_EPOCH: ""}
# Uneven inputs under Join, two optimizers and a moving average.
UNUSUAL = UNEVEN | {
    "for batch in train_loader": "for batch in joined(model, train_loader)",
    OPTIMIZER: """of_head = optim.SGD(net.head.parameters(), lr=10 * LR)
    opt = optim.Adam(net.body.parameters(), lr=LR)""",
    "opt.zero_grad()": "net.zero_grad()",
    STEP: f"{STEP}            of_head.step()\n",
    SCHEDULE: "",
    "net.state_dict()": "AveragedModel(net).state_dict()",
    NET: f'{NET}    net.compile(backend="eager", fullgraph=True)\n',
}

MISTAKES = {
    # Rank 0 makes a step more: weights are compared as far as both ranks step. A schedule's length would differ too.
    "no wrapper": Ailment(UNEVEN | {WRAP: "model = net", SCHEDULE: ""}, "weights", "forward_through_module"),
    "converted after wrapping": Ailment({WRAP: f"{WRAP}.to(torch.float64)"}, "weights", "moved_after_wrapping"),
    "head replaced after the optimizer": Ailment(
        {
            WRAP: f"old = list(net.parameters())\n    net.head = nn.Linear(16, 2)\n    {WRAP}",
            "(net.parameters(), lr": "(old, lr",
        },
        "parameters of the optimizer",
        "replaced_parameters",
    ),
    "optimizer made before sharding": Ailment(
        {WRAP: f"old = list(net.parameters())\n    {SHARD}", "(net.parameters(), lr": "(old, lr"},
        "parameters of the optimizer",
        "optimizer_made_first",
    ),
    # The schedule is of one of two optimizers, and learning rates are compared as far as both ranks step.
    "schedule on rank 0": Ailment(
        UNUSUAL | {SCHEDULE: f"            if rank == 0:\n    {SCHEDULE}"}, "learning rates", "schedule_on_rank_0"
    ),
    "schedule too fast": Ailment(
        {SCHEDULE: 2 * SCHEDULE}, "schedule", "schedule_too_fast", "the learning rate is 0 in the last 7 of 16 steps"
    ),
    "accumulation off by one": Ailment(
        {
            "for batch in train_loader": "for number, batch in enumerate(train_loader)",
            "            opt.zero_grad()\n": "",
            STEP: f"            if number % 3 == 0:\n    {STEP}                opt.zero_grad()\n",
        },
        "accumulation",
        "accumulation_off_by_one",
        "the steps are of 1, 3, 3, … micro-batches",
    ),
    "clipped while scaled": Ailment(
        {
            OPTIMIZER: f'{OPTIMIZER}\n    scaler = torch.amp.GradScaler("cuda")',
            "loss.backward()": "scaler.scale(loss).backward()",
            STEP: "            scaler.step(opt)\n            scaler.update()\n",
        },
        "clipping",
        said="16 of 16 times gradients were clipped",
    ),
    "no sampler": Ailment(
        {LOADER: "DataLoader(train_set, BATCH_SIZE, shuffle=True)"}, "training samples", "different_orders"
    ),
    "set_epoch forgotten": Ailment({SET_EPOCH: ""}, "order of the epochs", "set_epoch_forgotten"),
    "same dropout": Ailment(
        {"seed_everything(SEED + rank)": "seed_everything(SEED)", TRAIN_SET: "Circles(256, seed=1)"},
        "random numbers",
        "same_random_numbers",
        "the first 15 forwards in training after a step drew the same",
    ),
    "stream read whole on each rank": Ailment(
        {
            TRAIN_SET: "Circles(256, seed=1)",
            LOADER: "DataLoader(Stream(train_set, range(256)), BATCH_SIZE)",
            FORWARD: 'criterion(model(x=batch["x"]), batch["y"])',
        },
        "training samples",
        said="the same 256 samples in the same order",
    ),
    "padded evaluation": Ailment(
        {
            # It is evaluated without gradients, but in training mode.
            NET: f"{NET}    net.train = lambda mode=True: net\n",
            "sampler=range(rank, len(valid_set), world)": "sampler=DistributedSampler(valid_set)",
        },
        "evaluation samples",
        "padded_evaluation",
    ),
    "statistics of each rank": Ailment(BATCHNORM, "BatchNorm's statistics", "batchnorm_statistics"),
    "every rank saves": Ailment({"    torch.save(": "torch.save("}, "files", "every_rank_saves"),
    "prefixed keys": Ailment({"net.state_dict()": "model.state_dict()"}, "saved keys", "prefixed_keys"),
    "split by the seed of each rank": Ailment(
        {TRAIN_SET: "random_split(Circles(300, seed=1), [256, 44], torch.Generator().manual_seed(rank))[0]"},
        "training samples",
        said="a Subset of its own, and the Subsets overlap",
    ),
    "data drawn anew on each rank": Ailment(
        {TRAIN_SET: "Circles(256, seed=1 + rank, jitter=0.01)"}, "datasets", said="have other contents on another"
    ),
}
# What looks like a mistake and is none.
HARMLESS = {
    "stream shared out": Ailment(
        {LOADER: "DataLoader(Stream(train_set, range(rank, 256, world)), BATCH_SIZE)"},
        said="the samples have no indices",
    ),
    "padding dropped at the end": Ailment(
        {
            "sampler=range(rank, len(valid_set), world)": "sampler=DistributedSampler(valid_set)",
            "dist.all_reduce(counts)": "dist.barrier()\n        dist.all_gather_object([None] * world, counts)",
        },
        said="the script gathers from all ranks",
    ),
    "batches cut by the script": Ailment(
        {
            LOADER: "DataLoader(train_set, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(1))",
            FORWARD: 'criterion(model(x=batch["x"][rank::world]), batch["y"][rank::world])',
        },
        said="the script may train it on a part of them",
    ),
    "weights made equal every 80 steps": Ailment(
        {
            WRAP: "model = net",
            "EPOCHS = 2": "EPOCHS = 11",
            "model.eval()": "[dist.broadcast(w.data, 0) for w in net.parameters() if epoch == 9]\n        model.eval()",
        },
        said="weights (they differ after step 1, but are equal again later",
    ),
    "weights averaged at the end": Ailment(
        {
            WRAP: "model = net",
            "    del model": "    [dist.all_reduce(w.data) for w in net.parameters()]\n    del model",
        },
        said="weights (they may be averaged after the last step",
    ),
    "unusual": Ailment(UNUSUAL, said="weights (the ranks make only the first 14 of 36 steps together"),
}
# What ends badly, or never. The first finding is about the end.
ENDS = {
    "collective on rank 0": Ailment(
        {"dist.all_reduce(running)": "if rank == 0:\n            dist.all_reduce(running)"},
        pitfall="collective_on_rank_0",
        said="was called by rank 0 alone",
    ),
    "uneven inputs": Ailment(UNEVEN, pitfall="uneven_inputs", said="rank 0 has 9 batches, rank 1 has 8 batches"),
    "uneven evaluation": Ailment(
        {WRAP: SHARD, "valid_set, BATCH_SIZE": "valid_set, 10"},
        pitfall="uneven_evaluation",
        said="in evaluation 0 rank 0 has 6 batches, rank 1 has 5 batches",
    ),
    "unused parameter": Ailment(
        {NET: f"{NET}    net.spare = nn.Linear(16, 2)\n"},
        pitfall="unused_parameter",
        said="gradients of parameters that the forward does not use",
    ),
    "evaluation on rank 0": Ailment(
        BATCHNORM | {"in valid_loader": "in valid_loader if rank == 0 else []", "(net(": "(model("},
        pitfall="collective_on_rank_0",
        said="the ranks have begun 1, 0 evaluations",
    ),
    "collective in each batch of an uneven evaluation": Ailment(
        {"valid_set, BATCH_SIZE": "valid_set, 10", "counts[1] += ": "dist.barrier()\n                counts[1] += "},
        said="in evaluation 0 rank 0 has 6 batches, rank 1 has 5 batches",
    ),
    "error behind a barrier": Ailment(
        {SCHEDULE: "            try: 1 / (1 - rank)\n            finally: rank == 0 or dist.barrier()\n"},
        said="and handles ZeroDivisionError: division by zero",
    ),
    "rank that leaves its loop": Ailment({"range(EPOCHS)": "range(EPOCHS - rank)"}, said="rank 1 has ended"),
}
