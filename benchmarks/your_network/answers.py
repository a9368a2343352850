"""The beginning and the end of every answer about a network."""

import argparse
import json

from benchmarks.your_network import spec, training
from benchmarks.your_network.spec import UserNetwork
from common.errors import fail
from common.files import write_atomically


def network(options: argparse.Namespace) -> UserNetwork:
    """The network that the flags name.

    Raises:
        UserError: where there is no such network.
        StepFailed: where its batches have not as many samples as they are asked for.
    """
    return training.with_shared_inputs(spec.load(options.spec, options.input, options.optimizer))


def print_assumption(network: UserNetwork) -> None:
    if network.assumed:
        print(f"{network.assumed}.")


def conclude(options: argparse.Namespace, verdict: list[str], record: dict) -> None:
    """Print the verdict, and write the whole answer as JSON if that was asked for."""
    print()
    print(*verdict, sep="\n")
    if options.json:
        asked = {"spec": options.spec, "question": options.question}
        text = json.dumps({**asked, **record, "verdict": verdict}, indent=1)
        try:
            write_atomically(options.json, text + "\n")
        except OSError as error:
            fail(f"--json: {error}")
