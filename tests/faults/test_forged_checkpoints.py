"""Whatever somebody put into a checkpoint's folder, nothing outside of it is read, changed, moved or removed."""

import contextlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from common.accelerator import Accelerator, checkpointing
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration
from tests.faults.jobs import ON_LINUX

SEED = 20_261_121
FORBIDDEN_WEIGHT = 666.0
FILES = ["manifest.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl", ".complete"]
# Names for a file in a manifest; `{outside}` is what must not be reached.
EVIL_NAMES = [
    "{outside}/precious/thesis.txt",
    "../../../outside/checkpoint_7/model.safetensors",
    "../../outside/precious/thesis.txt",
    "a/../../../../outside/precious/thesis.txt",
    "link/thesis.txt",
    "link",
    ".complete/../../x",
    ".complete/manifest.json",
    "..",
    "",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "a/" * 500 + "a",
    "manifest.json",
]
EVIL_VALUES = [-1, 10**30, None, "4", [], {}, True, 1.5, "../x"]


def project_at(root: Path, **settings) -> tuple[Accelerator, torch.nn.Linear]:
    config = ProjectConfiguration(project_dir=root / "project", **settings)
    accelerator = Accelerator(project_config=config, cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model


def build_world(root: Path) -> None:
    """A project with two checkpoints, one of them interrupted, and beside it what must not be touched."""
    accelerator, model = project_at(root)
    torch.nn.init.constant_(model.weight, FORBIDDEN_WEIGHT)
    accelerator.save_state(root / "outside/checkpoint_7")
    (root / "outside/precious").mkdir()
    (root / "outside/precious/thesis.txt").write_text("years of work")
    torch.nn.init.constant_(model.weight, 1.0)
    for number in range(2):
        accelerator.save_state(root / f"project/checkpoints/checkpoint_{number}")
    accelerator.end_training()
    interrupted = root / "project/checkpoints/checkpoint_1"
    shutil.copytree(interrupted, root / "draft")
    (root / "draft").rename(interrupted / ".complete")
    (interrupted / "optimizer.bin").unlink()


def seen_outside(root: Path) -> dict[str, tuple]:
    """Content and time of change of every file and folder outside of the project."""
    found = {}
    for path in sorted((root / "outside").rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else sorted(os.listdir(path))
        found[str(path)] = (content, status.st_mtime_ns, status.st_mode)
    return found


def replace(path: Path, content: bytes | None = None) -> None:
    """Write a file, or only make room: it may be a link, through which the forger would change the outside himself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


# What somebody does to a checkpoint's folder who wants to reach what is outside.


def change_manifest(folder: Path, outside: Path, choice: random.Random) -> None:
    """Another name or another entry for one of its files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    name = choice.choice(sorted(manifest["files"]))
    entry = manifest["files"][name]
    if choice.random() < 0.5:
        del manifest["files"][name]
    if choice.random() < 0.6:
        name = choice.choice(EVIL_NAMES).format(outside=outside)
    else:
        entry = choice.choice([*EVIL_VALUES, {"bytes": 4, "checksum": choice.choice(EVIL_VALUES)}])
    manifest["files"][name] = entry
    if choice.random() < 0.1:
        manifest["format_version"] = choice.choice([*EVIL_VALUES, 6, 8])
    replace(folder / "manifest.json", json.dumps(manifest).encode())


def damage_manifest(folder: Path, outside: Path, choice: random.Random) -> None:
    content = (folder / "manifest.json").read_bytes()
    start = choice.randrange(len(content))
    noise = choice.choice([b"", b"\xff", b"[" * 50_000, b'"format_version": 7, ', b"\x00", content[start:]])
    replace(folder / "manifest.json", content[:start] + noise + content[start + choice.randint(0, 20) :])


def put_link(folder: Path, outside: Path, choice: random.Random) -> None:
    place = folder / choice.choice([*FILES, "link", ""])
    target = choice.choice(["precious", "precious/thesis.txt", "checkpoint_7", "nowhere"])
    if target == "checkpoint_7" and place.suffix:
        target = f"checkpoint_7/{place.name}"
    replace(place)
    place.symlink_to(outside / target)


def put_folder_or_draft(folder: Path, outside: Path, choice: random.Random) -> None:
    """A folder, with a link in it, where a file is expected, or that bears the name of a draft."""
    place = folder / choice.choice([*FILES, ".draft", f"../.{folder.name}.draft", "../.checkpoint_9.draft"])
    replace(place)
    place.mkdir()
    (place / "link").symlink_to(outside / "precious")


def copy_manifest_to_complete(folder: Path, outside: Path, choice: random.Random) -> None:
    (folder / ".complete").mkdir(exist_ok=True)
    shutil.copy(folder / "manifest.json", folder / ".complete" / "manifest.json", follow_symlinks=False)


def remove_something(folder: Path, outside: Path, choice: random.Random) -> None:
    replace(choice.choice(sorted(folder.iterdir())))


WAYS = [
    *(change_manifest, change_manifest, change_manifest, put_link, put_link, put_folder_or_draft, put_folder_or_draft),
    *(damage_manifest, copy_manifest_to_complete, remove_something),
]


def forge(world: Path, choice: random.Random) -> list[str]:
    """Change the project at random; returns the changes."""
    log = []
    for _ in range(choice.randint(1, 4)):
        name = choice.choice(["checkpoint_0", "checkpoint_1", "checkpoint_1/.complete"])
        folder = world / "project/checkpoints" / name
        way = choice.choice(WAYS)
        if world / "outside" in folder.resolve().parents:  # an earlier change made the folder a link
            continue
        with contextlib.suppress(Exception):  # an earlier change may be in its way
            way(folder, world / "outside", choice)
            log.append(f"{way.__name__} in {name}")
    return log


def use(root: Path, choice: random.Random) -> torch.Tensor:
    """Load, resume or save in the project, as a script would; returns the weight that the model then has."""
    accelerator, model = project_at(root, automatic_checkpoint_naming=True, total_limit=1)
    config = accelerator.project_configuration
    one = root / "project/checkpoints" / choice.choice(["checkpoint_0", "checkpoint_1"])
    actions = ["load newest", "save"]
    if not one.is_symlink():  # whoever names a link wants what it leads to
        actions += ["load one", "load one", "save over"]
    action = choice.choice(actions)
    try:
        if action == "load one":
            accelerator.load_state(one)
        elif action == "load newest":
            accelerator.load_state()
        elif action == "save":
            config.iteration = 9
            accelerator.save_state()
        else:
            config.automatic_checkpoint_naming = False
            accelerator.save_state(one)
            checkpointing.finish_and_verify(one)
    except CheckpointError as error:
        assert str(error)
    finally:
        accelerator.end_training()
    return model.weight.detach()


@ON_LINUX
@pytest.mark.parametrize(
    "seeds",
    [
        range(SEED, SEED + 60),
        pytest.param(range(SEED + 1000, SEED + 1300), marks=pytest.mark.slow),
        pytest.param(range(SEED + 1300, SEED + 2500), marks=pytest.mark.long),
    ],
    ids=len,
)
def test_no_forged_folder_reaches_outside_of_itself(tmp_path, seeds):
    build_world(tmp_path / "original")
    world = tmp_path / "world"
    for seed in seeds:
        shutil.copytree(tmp_path / "original", world, symlinks=True)
        choice = random.Random(seed)
        log = forge(world, choice)
        before = seen_outside(world)
        try:
            weight = use(world, choice)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__} after {log}") from error
        assert seen_outside(world) == before, f"seed {seed}: {log}"
        assert not (weight == FORBIDDEN_WEIGHT).any(), f"seed {seed}: {log}"
        shutil.rmtree(world)
