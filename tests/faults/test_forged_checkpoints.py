"""Whatever somebody put into a checkpoint's folder, nothing outside of it is read, changed, moved or removed."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.accelerator import Accelerator, checkpointing
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration
from tests.faults.jobs import ON_LINUX

SEED = 20_261_121
FORBIDDEN_WEIGHT = 666.0


def build_world(root: Path) -> None:
    """A project with two checkpoints, one of them interrupted, and beside it what must not be touched."""
    config = ProjectConfiguration(project_dir=root / "project")
    accelerator = Accelerator(project_config=config, cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model.weight.fill_(FORBIDDEN_WEIGHT)
    accelerator.save_state(root / "outside/checkpoint_7")
    (root / "outside/precious").mkdir()
    (root / "outside/precious/thesis.txt").write_text("years of work")
    with torch.no_grad():
        model.weight.fill_(1.0)
    for number in range(2):
        accelerator.save_state(root / f"project/checkpoints/checkpoint_{number}")
    accelerator.end_training()
    interrupted = root / "project/checkpoints/checkpoint_1"
    draft = root / "draft"
    shutil.copytree(interrupted, draft)
    draft.rename(interrupted / ".complete")
    (interrupted / "optimizer.bin").unlink()


def seen_outside(root: Path) -> dict[str, tuple]:
    """Content and time of change of every file and folder outside of the project."""
    found = {}
    for path in sorted((root / "outside").rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else sorted(os.listdir(path))
        found[str(path)] = (content, status.st_mtime_ns, status.st_mode)
    return found


class Forger:
    """Changes a project at random, as somebody could who wants to reach what is outside."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.outside = root / "outside"
        self.random = random.Random(seed)
        self.log: list[str] = []
        self.ways: list[Callable[[Path], None]] = [
            self.rename_in_manifest,
            self.rename_in_manifest,
            self.change_entry,
            self.damage_manifest,
            self.put_link,
            self.put_link,
            self.put_folder,
            self.put_draft,
            self.copy_manifest_to_complete,
            self.remove_something,
        ]

    def forge(self) -> None:
        checkpoints = self.root / "project/checkpoints"
        for _ in range(self.random.randint(1, 4)):
            folder = checkpoints / self.random.choice(["checkpoint_0", "checkpoint_1", "checkpoint_1/.complete"])
            way = self.random.choice(self.ways)
            if self.outside in folder.resolve().parents:  # An earlier change made the folder a link.
                continue
            self.log.append(f"{way.__name__} in {folder.relative_to(checkpoints)}")
            try:
                way(folder)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self.log.append(f"  in vain: {type(error).__name__}")  # an earlier change is in its way

    def evil_name(self, folder: Path) -> str:
        target = self.random.choice(["precious/thesis.txt", "checkpoint_7/model.safetensors"])
        up = "../" * self.random.randint(1, 4)
        return self.random.choice(
            [
                str(self.outside / target),
                os.path.relpath(self.outside / target, folder),
                f"{up}outside/{target}",
                f"a/{up}../outside/precious/thesis.txt",
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
        )

    def rename_in_manifest(self, folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        name = self.random.choice(sorted(manifest["files"]))
        evil = self.evil_name(folder)
        self.log.append(f"  {name} -> {evil[:60]!r}")
        entry = manifest["files"].pop(name) if self.random.random() < 0.5 else manifest["files"][name]
        manifest["files"][evil] = entry
        self.write(path, json.dumps(manifest).encode())

    def change_entry(self, folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        name = self.random.choice(sorted(manifest["files"]))
        values = [-1, 10**30, None, "4", [], {}, True, 1.5, "../x"]
        manifest["files"][name] = self.random.choice([*values, {"bytes": 4, "checksum": self.random.choice(values)}])
        if self.random.random() < 0.2:
            manifest["format_version"] = self.random.choice([*values, 1, 6])
        self.write(path, json.dumps(manifest).encode())

    def damage_manifest(self, folder: Path) -> None:
        path = folder / "manifest.json"
        content = path.read_bytes()
        start = self.random.randrange(len(content))
        noise = [b"", b"\xff", b"[" * 50_000, b'"format_version": 5, ', b"\x00", content[start:]]
        self.write(path, content[:start] + self.random.choice(noise) + content[start + self.random.randint(0, 20) :])

    def put_link(self, folder: Path) -> None:
        names = ["manifest.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "link", ".complete", ""]
        target = self.random.choice(["precious", "precious/thesis.txt", "checkpoint_7", "nowhere"])
        place = folder / self.random.choice(names)
        if target == "checkpoint_7" and place.suffix:
            target = f"checkpoint_7/{place.name}"
        self.log.append(f"  {place.name} -> {target}")
        self.remove(place)
        place.symlink_to(self.outside / target)

    def put_folder(self, folder: Path) -> None:
        place = folder / self.random.choice(["manifest.json", "model.safetensors", "optimizer.bin", ".complete"])
        self.remove(place)
        place.mkdir()
        if self.random.random() < 0.5:
            (place / "link").symlink_to(self.outside / "precious")

    def put_draft(self, folder: Path) -> None:
        process = self.random.choice([10**20, 10**9, 0, 1, os.getpid(), "-1", "1e3", "٣"])
        place = folder / f".x@{process}@{self.random.choice([socket.gethostname(), 'elsewhere', ''])}.tmp"
        self.log.append(f"  {place.name}")
        if self.random.random() < 0.5:
            place.symlink_to(self.outside / "precious")
        else:
            place.mkdir()
            (place / "link").symlink_to(self.outside / "precious")

    def copy_manifest_to_complete(self, folder: Path) -> None:
        complete = folder / ".complete"
        complete.mkdir(exist_ok=True)
        shutil.copy(folder / "manifest.json", complete / "manifest.json", follow_symlinks=False)

    def remove_something(self, folder: Path) -> None:
        contents = sorted(folder.iterdir())
        if contents:
            self.remove(self.random.choice(contents))

    def write(self, path: Path, content: bytes) -> None:
        self.remove(path)  # It may be a link, through which the forger would change the outside himself.
        path.write_bytes(content)

    @staticmethod
    def remove(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def use(project: Path, choice: random.Random) -> torch.Tensor:
    """Load, resume or save in the project, as a script would; returns the weight that the model then has."""
    config = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=config, cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    one = project / "checkpoints" / choice.choice(["checkpoint_0", "checkpoint_1"])
    actions = ["load newest", "save"]
    if not one.is_symlink():  # Whoever names a link wants what it leads to.
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


def fuzz(root: Path, seeds: range) -> None:
    """Try one forged project for each seed."""
    build_world(root / "original")
    for seed in seeds:
        world = root / "world"
        shutil.copytree(root / "original", world, symlinks=True)
        forger = Forger(world, seed)
        forger.forge()
        before = seen_outside(world)
        try:
            weight = use(world / "project", forger.random)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__} after {forger.log}") from error
        assert seen_outside(world) == before, f"seed {seed}: {forger.log}"
        assert not (weight == FORBIDDEN_WEIGHT).any(), f"seed {seed}: {forger.log}"
        shutil.rmtree(world)


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
    fuzz(tmp_path, seeds)
