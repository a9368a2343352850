"""The lock on a folder of checkpoints ends with the process that holds it, however that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import ladder
from common.errors import UserError
from common.run.checkpointing import checkpoint_lock

HOLDER = """
import os, sys, time
from pathlib import Path
from common.run.checkpointing import checkpoint_lock
with checkpoint_lock(Path(sys.argv[1])):
    worker = os.fork()  # as a DataLoader starts its workers
    if worker:
        print(worker, flush=True)
    time.sleep(120)
"""


@pytest.mark.slow
def test_a_loader_worker_does_not_hold_the_lock_of_its_killed_rank(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ladder.ROOT) as holder:
        worker = int(holder.stdout.readline())
        with pytest.raises(UserError), checkpoint_lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    try:
        assert Path(f"/proc/{worker}").exists()
        with checkpoint_lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
