"""Check this machine and its configuration with a real run: sharding, gathering, equal weights; prints a verdict."""

from .config import default_config_file


def add_arguments(parser) -> None:
    parser.add_argument("--config_file", help="the configuration to check; by default the default one")
    parser.add_argument("--num_processes", type=int, help="by default one per GPU, or 2 on the CPU")
    parser.add_argument("--cpu", action="store_true")


def run(args) -> int:
    import torch

    from .accelerate_cli import main

    gpus = torch.cuda.device_count()
    if args.num_processes is None and not args.config_file and not default_config_file().is_file():
        args.num_processes, args.cpu = max(2, gpus), args.cpu or gpus < 2
    options = {"--config_file": args.config_file, "--num_processes": args.num_processes}
    arguments = [part for name, value in options.items() if value is not None for part in (name, str(value))]
    cpu = ["--cpu"] if args.cpu else []
    code = main(["launch", *arguments, *cpu, "--module", f"{__package__}.self_check"])
    if code:
        print("FAILED: the reason stands above")
    return code
