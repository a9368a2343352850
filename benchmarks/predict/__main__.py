"""From which batch on 2, 8, 64 and 512 GPUs pay: a prediction, and how it does against published measurements.

python -m benchmarks.predict
python -m benchmarks.predict --gpu v100 --inner pcie3 --network 100g
python -m benchmarks.predict --page prediction.html
"""

import argparse
import sys
from pathlib import Path

from benchmarks.predict import presets
from benchmarks.predict.table import pay_table, published_table


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predict", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    usual = presets.Hardware()
    flag("--gpu", choices=presets.GPUS, default=usual.gpu, help="kind of GPU (%(default)s)")
    flag("--inner", choices=presets.INNER, default=usual.inner, help="links between a node's GPUs (%(default)s)")
    flag("--network", choices=presets.NETWORK, default=usual.network, help="network cards of a node (%(default)s)")
    sizes = {"choices": presets.NODE_SIZES, "default": usual.gpus_per_node}
    flag("--gpus-per-node", type=int, **sizes, metavar="N", help="1, 2, 4 or 8 (%(default)s)")
    flag("--page", type=Path, metavar="PATH", help="write a page with sliders too, which starts with these flags")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_options()
    hardware = presets.Hardware(options.gpu, options.inner, options.network, options.gpus_per_node)
    cluster = presets.cluster(hardware.inner, hardware.network, hardware.gpus_per_node)
    print(pay_table(presets.GPUS[hardware.gpu], cluster))
    print()
    print(published_table())
    if options.page:
        # What a page is made with imports torch, which takes seconds and which the tables do not need.
        from benchmarks.predict.page import Start, page
        from common.files import write_atomically

        try:
            write_atomically(options.page, page(Start(hardware)))
        except OSError as error:
            sys.exit(f"error: --page: {error}")
        print(f"\nWritten to {options.page}")


if __name__ == "__main__":
    main()
