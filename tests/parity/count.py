"""Count how many random scripts end with the original's bits, and which rows of the READMEs' tables the others touch.

    python -m tests.parity.count orders --processes 2 --number 300
    python -m tests.parity.count trainings --processes 3 --number 300
    python -m tests.parity.count trainer --processes 2 --number 200

`orders` are loops over random loaders and `trainings` are small trainings, both on Accelerate and on the core. With
`trainer` they are trainings on transformers' Trainer and on ours. A script that differs without touching a row ends the
count with an error that shows the script.
"""

import argparse
import tempfile
import warnings
from collections import Counter

from common.processes import ranks
from tests.unit.accelerator import test_same_order, test_same_training
from tests.unit.trainer import test_same_as_transformers

FIRST_TRAINER_SEED = 1000


def count_orders(number: int, processes: int) -> Counter:
    """Loops over random loaders; `None` counts those that are equal, as everywhere here."""
    if processes > 1:
        return test_same_order.compare_on_processes(processes, number)
    from accelerate import Accelerator

    Accelerator(cpu=True)
    chosen = [test_same_order.seeded_script(seed, 1) for seed in range(number)]
    return Counter(map(test_same_order.compare_played, chosen))


def count_trainings(number: int, processes: int) -> Counter:
    return test_same_training.compare_random_scripts(range(number), processes)


def count_trainer(number: int, processes: int) -> Counter:
    seeds = range(FIRST_TRAINER_SEED, FIRST_TRAINER_SEED + number)
    with tempfile.TemporaryDirectory() as folder:
        counts = test_same_as_transformers.compare(seeds, processes, folder)
    counts[None] = number - counts.pop("all", 0)
    return counts


COUNTS = {"orders": count_orders, "trainings": count_trainings, "trainer": count_trainer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=COUNTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--number", type=int, default=300)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        counts = COUNTS[args.kind](args.number, args.processes)
    finally:
        if args.processes > 1:
            ranks(args.processes).stop()
    print(f"{args.kind}, {args.number} on {args.processes} process(es): {counts.pop(None, 0)} equal")
    for row, touched in counts.most_common():
        print(f"{touched:5} {row}")


if __name__ == "__main__":
    main()
