"""From which batch on 2, 8, 64 and 512 GPUs pay: a prediction, and how it does against published measurements.

python -m benchmarks.predict
python -m benchmarks.predict --gpu v100 --inner pcie3 --network 100g
python -m benchmarks.predict --page prediction.html
"""

import argparse
from pathlib import Path

from benchmarks.predict import presets
from benchmarks.predict.table import pay_table, published_table


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--gpu", choices=presets.GPUS, default="a100", help="kind of GPU (a100)")
    flag("--inner", choices=presets.INNER, default="nvlink-a100", help="links between a node's GPUs (nvlink-a100)")
    flag("--network", choices=presets.NETWORK, default="8x200g", help="network cards of a node (8x200g)")
    flag("--gpus-per-node", type=int, choices=[1, 2, 4, 8], default=8, metavar="N", help="1, 2, 4 or 8 (8)")
    flag("--page", type=Path, metavar="PATH", help="also write a page with sliders there")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_options()
    cluster = presets.cluster(options.inner, options.network, options.gpus_per_node)
    print(pay_table(presets.GPUS[options.gpu], cluster))
    print()
    print(published_table())
    if options.page:
        _write_page(options.page)
        print(f"\nWritten to {options.page}")


def _write_page(path: Path) -> None:
    # What a page is made with imports torch, which takes seconds and which the tables do not need.
    from benchmarks.predict.page import page
    from common.files import write_atomically

    write_atomically(path, page())


if __name__ == "__main__":
    main()
