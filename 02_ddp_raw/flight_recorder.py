"""Which collectives has each rank called? torch's flight recorder notes them, and this compares the ranks' notes.

In a script, after `init_process_group`, let each rank write its notes before a hanging collective times out:

    write_notes_after(seconds, folder)

Start the script with TORCH_FR_BUFFER_SIZE=100, the number of collectives that are kept, and then compare:

    python 02_ddp_raw/flight_recorder.py FOLDER
"""

import argparse
import pickle
import threading
from pathlib import Path

import torch.distributed as dist


def write_notes_after(seconds: float, folder: str) -> None:
    """Write this rank's notes from a thread, because the rank itself will be waiting."""
    # The first dump needs it, and would import it for seconds while the time-out comes near.
    import torch._dynamo  # noqa: F401
    from torch._C._distributed_c10d import _dump_fr_trace

    path = Path(folder, f"rank_{dist.get_rank()}.pickle")
    path.parent.mkdir(exist_ok=True)
    timer = threading.Timer(seconds, lambda: path.write_bytes(_dump_fr_trace()))
    timer.daemon = True  # a script that ends earlier does not wait for it
    timer.start()


def compare(folder: str) -> None:
    """Print for each rank how many collectives it has called, and from which line the last one."""
    for path in sorted(Path(folder).glob("rank_*.pickle")):
        last = pickle.loads(path.read_bytes())["entries"][-1]
        # The innermost frames are torch's own.
        frame = next(frame for frame in last["frames"] if "/torch/" not in frame["filename"])
        line = f"{Path(frame['filename']).name}:{frame['line']}"
        print(f"{path.stem}: {last['collective_seq_id']} collectives, the last is {last['profiling_name']} at {line}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the notes of the ranks.")
    parser.add_argument("folder", help="the one that was given to write_notes_after")
    compare(parser.parse_args().folder)
