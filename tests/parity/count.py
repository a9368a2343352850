"""Count how many random scripts end with the original's bits, and which deliberate differences excuse the others.

    python -m tests.parity.count orders --processes 2 --number 300
    python -m tests.parity.count trainings --processes 3 --number 300
    python -m tests.parity.count trainer --processes 2 --number 200

`orders` are loops over random loaders and `trainings` are small trainings, both on Accelerate and on the core. With
`trainer` they are trainings on transformers' Trainer and on ours. A script that differs where no row of the tables
excuses it ends the count with an error that shows the script.
"""

import argparse
import tempfile
import warnings

from common.processes import ranks
from tests.parity.random_orders import ORDERS
from tests.parity.random_scripts import compare
from tests.parity.random_trainers import TRAINERS
from tests.parity.random_trainings import TRAININGS

KINDS = {"orders": ORDERS, "trainings": TRAININGS, "trainer": TRAINERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = range(args.first, args.first + args.number)
    with tempfile.TemporaryDirectory() as folder:
        counts = compare(KINDS[args.kind], seeds, args.processes, folder)
    if args.processes > 1:
        ranks(args.processes).stop()
    print(f"{args.kind}, {args.number} on {args.processes} process(es): {counts.pop(None, 0)} equal")
    for row, excused in counts.most_common():
        print(f"{excused:5} {row}")


if __name__ == "__main__":
    main()
