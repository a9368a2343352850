"""Ranks that fail or hang print what the page about hangs shows."""

import re
import subprocess
import sys

import pytest

from common import ladder
from tests.docs.pages import outputs
from tests.jobs import run_all_to_end

SCRIPT = "02_ddp_raw/one_rank_fails.py"
RAISES = f"torchrun --standalone --nproc-per-node 3 {SCRIPT} raises"
LEAVES_OUT = f"TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --standalone --nproc-per-node 3 {SCRIPT} leaves-out"
DIFFERS = f"TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --standalone --nproc-per-node 3 {SCRIPT} differs"
UNREPORTED = "json.decoder.JSONDecodeError: Expecting value"
SHOWN = outputs(ladder.ROOT / "02_ddp_raw" / "WHEN_IT_HANGS.md")
FOLLOW_ON = re.compile(r"Connection (closed by peer|reset by peer)|Signal 15 \(SIGTERM\)")


def parts(output: str) -> list[str]:
    """The pieces of a shown output between its cuts, without indentation and without lines of a follow-on error.

    torchrun may end a rank before it has noticed that its neighbour has gone, so such a line may be missing.
    """
    lines = [line for line in output.splitlines() if not FOLLOW_ON.search(line)]
    pieces = [piece.strip() for line in lines for piece in line.split("…")]
    return [piece for piece in pieces if piece]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder in which ranks with flight recorders are started."""
    return tmp_path_factory.mktemp("recorded")


def run_until_reported(commands: dict[str, list[str]]) -> dict:
    """The ending of each command, with torchrun's report.

    torchrun ends without one when it reads the file of an error while a rank still writes it. It is started again then.
    """
    endings = run_all_to_end(commands)
    unreported = {name: commands[name] for name in endings if UNREPORTED in endings[name].stderr}
    return endings | run_all_to_end(unreported)


@pytest.fixture(scope="module")
def endings(recorded) -> dict:
    """The ending of each command. They run at the same time, because they mostly wait; one has flight recorders."""
    torchrun = f"{sys.executable} -m torch.distributed.run"
    commands = {}
    for command in (RAISES, LEAVES_OUT, DIFFERS):
        commands[command] = ["bash", "-c", command.replace("torchrun", torchrun)]
    hanging = f"{torchrun} --standalone --nproc-per-node 3 {ladder.ROOT / SCRIPT} leaves-out --timeout 12"
    commands["recorded"] = ["bash", "-c", f"cd {recorded} && TORCH_FR_BUFFER_SIZE=100 {hanging}"]
    return run_until_reported(commands)


@pytest.mark.slow
@pytest.mark.parametrize("command", [RAISES, LEAVES_OUT, DIFFERS], ids=["raises", "leaves out", "differs"])
def test_the_output_shown_is_that_of_the_command(command, endings):
    assert endings[command].returncode == 1
    for part in parts(SHOWN[command]):
        assert part in endings[command].stderr


def reported_errors(printed: str) -> dict[str, str]:
    _, *errors = printed.partition(f"{SCRIPT} FAILED")[2].split("  rank      : ")
    return {error[0]: error for error in errors}


@pytest.mark.slow
def test_the_cause_is_no_follow_on_error(endings):
    errors = reported_errors(endings[RAISES].stderr)
    assert sorted(errors) == ["0", "1", "2"]
    assert "ValueError: the image of sample 1234 cannot be read" in errors["1"]
    assert FOLLOW_ON.search(errors["0"]) and FOLLOW_ON.search(errors["2"]) and not FOLLOW_ON.search(errors["1"])


@pytest.mark.slow
def test_the_flight_recorder_names_the_missing_rank(endings, recorded):
    assert endings["recorded"].returncode == 1
    comparing = [sys.executable, str(ladder.ROOT / "02_ddp_raw" / "flight_recorder.py"), "flight_records"]
    printed = subprocess.run(comparing, cwd=recorded, capture_output=True, text=True, check=True).stdout
    assert printed == SHOWN["python 02_ddp_raw/flight_recorder.py flight_records"]
