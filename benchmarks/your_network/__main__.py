"""Questions about a network of your own, and about a training script.

    python -m benchmarks.your_network memory torchvision:resnet50 --batch 64 --devices 1 2 4 8
    python -m benchmarks.your_network memory my_file.py:build --precision bf16 --checkpointing
    python -m benchmarks.your_network predict torchvision:resnet50 --gpu h100 --inner nvlink-h100 --network 8x400g
    python -m benchmarks.your_network measure torchvision:resnet18 --input 3x64x64 --batch 32 --devices 1 2
    python -m benchmarks.your_network doctor --processes 2 my_train.py --epochs 2

What my_file.py may hold beside `build` is said in benchmarks/your_network/spec.py.
"""

import argparse

from benchmarks.your_network import flags
from common.errors import fail


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.your_network", description=__doc__.splitlines()[0])
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    flags.add_memory(questions)
    flags.add_predict(questions)
    flags.add_measure(questions)
    flags.add_doctor(questions)
    return parser.parse_args(argv)


def answer(options: argparse.Namespace) -> None:
    """Answer the question. What each needs imports torch, so it is imported where its flags are known to be right."""
    match options.question:
        case "memory":
            from benchmarks.your_network import memory

            memory.answer(options)
        case "predict":
            from benchmarks.your_network import predict

            predict.answer(options)
        case "measure":
            from benchmarks.your_network import measure

            measure.answer(options)
        case "doctor":
            from benchmarks.your_network.doctor import command

            command.answer_doctor(options)


def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv)
    from benchmarks.your_network.training import StepFailed, TooLarge

    try:
        answer(options)
    except TooLarge as error:
        fail(f"{error}; give a smaller --batch")
    except StepFailed as error:
        fail(str(error))


if __name__ == "__main__":
    main()
