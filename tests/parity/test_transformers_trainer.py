"""transformers' own Trainer over the core, by the alias: random trainings end with the bits that accelerate gives.

    torchrun [-m tests.alias] tests/parity/test_transformers_trainer.py FOLDER SEED…

trains on whichever library answers to `accelerate`, and leaves in FOLDER what each rank has seen.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def train_as_a_script(folder: Path, seeds: list[int]) -> None:
    """Each training from its beginning, and then once more from its first checkpoint."""
    from tests.parity import random_trainers
    from tests.states import THEIRS, reset_states

    world_size = int(os.environ["WORLD_SIZE"])
    outcomes = []
    for seed in seeds:
        config = random_trainers.draw_configuration(seed, world_size)
        config["arguments"] |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
        config["arguments"] |= {"load_best_model_at_end": False}
        config |= {"train_twice": False, "early_stopping": False}
        straight = random_trainers.outcome("transformers", config, f"{folder}/{seed}")
        reset_states(THEIRS)
        resumed = random_trainers.make_trainer("transformers", config, f"{folder}/resumed-{seed}")
        resumed.train(resume_from_checkpoint=f"{folder}/{seed}/checkpoint-1")
        weights = {name: random_trainers.digest(weight) for name, weight in resumed.model.state_dict().items()}
        outcomes += [straight, weights]
        reset_states(THEIRS)
    (folder / "library").write_text(type(resumed.accelerator).__module__)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))


def outcomes_of(folder: Path, world_size: int, seeds: range, *alias: str) -> list:
    """What each rank has seen, on the core where `alias` starts the script."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_CPU_THREADS": "1"}  # else the core shares out all cores
    command = [*torchrun, *alias, __file__, str(folder), *map(str, seeds)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize(
    "world_size, seeds",
    [
        pytest.param(2, range(4), marks=pytest.mark.slow),
        pytest.param(1, range(30), marks=pytest.mark.long),
    ],
)
def test_transformers_trainer_ends_with_the_bits_that_it_has_on_accelerate(world_size, seeds, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs = outcomes_of(tmp_path / "theirs", world_size, seeds)
    ours = outcomes_of(tmp_path / "ours", world_size, seeds, "-m", "tests.alias")
    assert ours == theirs
    assert (tmp_path / "theirs" / "library").read_text().startswith("accelerate.")
    assert (tmp_path / "ours" / "library").read_text().startswith("common.accelerator.")


if __name__ == "__main__":
    train_as_a_script(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]])
