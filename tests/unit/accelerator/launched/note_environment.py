"""Each rank writes what it sees of the launcher: `note_environment.py FOLDER …`. EXIT_CODE says how it ends."""

import json
import os
import sys
import time
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")

folder, *argv = sys.argv[1:]
seen = {name: value for name, value in os.environ.items() if name in NAMES or name.startswith("ACCELERATE_")}
name = os.environ.get("RANK", "alone")  # A world of one has no ranks.
Path(folder, f"{name}.json").write_text(json.dumps({**seen, "argv": argv}))
time.sleep(1)  # So two jobs that start together run at the same time.
sys.exit(int(os.environ.get("EXIT_CODE", "0")))
