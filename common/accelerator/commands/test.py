"""Check this machine and its configuration with a real run: sharding, gathering, equal weights; prints a verdict."""

from .config import default_config_file


def add_arguments(parser) -> None:
    parser.add_argument("--config_file", help="the configuration to check; by default the default one")
    parser.add_argument("--num_processes", type=int, help="by default one per GPU, or 2 on the CPU")
    parser.add_argument("--cpu", action="store_true")


def run(args) -> int:
    from .accelerate_cli import main

    arguments = ["launch"]
    if args.config_file:
        arguments += ["--config_file", args.config_file]
    if args.num_processes is not None:
        arguments += ["--num_processes", str(args.num_processes)]
    elif not args.config_file and not default_config_file().is_file():
        arguments += _at_least_two()
    if args.cpu:
        arguments.append("--cpu")
    code = main([*arguments, "--module", f"{__package__}.self_check"])
    if code:
        print("FAILED: the reason stands above")
    return code


def _at_least_two() -> list[str]:
    import torch

    gpus = torch.cuda.device_count()
    return ["--num_processes", str(gpus)] if gpus > 1 else ["--num_processes", "2", "--cpu"]
