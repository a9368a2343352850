"""A folder is a checkpoint or it is not; whatever it is, it is trusted in nothing but its own content."""

import json
import os
import shutil
import sys
import zlib
from pathlib import Path

import pytest
import torch

from common.accelerator import Accelerator, checkpointing
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration, checkpoint_folder
from tests.states import forget_states

NEEDS_LINKS = pytest.mark.skipif(os.name == "nt", reason="makes symbolic links")


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


@pytest.fixture
def precious(tmp_path):
    """A file of the user's, beside the folder of the checkpoint."""
    path = tmp_path / "precious.txt"
    path.write_text("mine")
    return path


def digest_of(content: bytes) -> dict:
    return {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def manifest_naming(*names: str, content: bytes = b"mine") -> str:
    return json.dumps({"format_version": 4, "files": {name: digest_of(content) for name in names}})


def names_outside(precious: Path) -> list[str]:
    return [str(precious), "../precious.txt", "a/../../precious.txt", "./../precious.txt"]


@pytest.mark.parametrize("which", range(4))
def test_a_name_that_leads_out_of_the_folder_is_refused_and_nothing_is_touched(which, accelerator, precious, tmp_path):
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    forged = manifest_naming(names_outside(precious)[which])
    (folder / "manifest.json").write_text(forged)
    (folder / ".complete").mkdir()
    (folder / ".complete/manifest.json").write_text(forged)
    before = sorted(folder.rglob("*"))
    for use in (accelerator.load_state, accelerator.save_state):
        with pytest.raises(CheckpointError):
            use(folder)
        assert precious.read_text() == "mine" and sorted(folder.rglob("*")) == before
    shutil.rmtree(folder / ".complete")
    with pytest.raises(CheckpointError):
        accelerator.load_state(folder)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("which", range(4))
def test_a_forged_manifest_of_before_does_not_say_what_an_interrupted_save_removes(
    which, accelerator, precious, tmp_path
):
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    (folder / ".complete").mkdir()
    (folder / "manifest.json").rename(folder / ".complete/manifest.json")  # the last that was left to be moved
    (folder / "manifest.json").write_text(manifest_naming(names_outside(precious)[which]))
    accelerator.load_state(folder)
    assert precious.read_text() == "mine" and not (folder / ".complete").exists()


BAD_NAMES = [
    "",
    ".",
    "..",
    "/",
    "a//b",
    "a/",
    "./a",
    "a/./b",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 300,
    "/".join("a" * 3000),
    "manifest.json",
    ".complete",
    ".complete/a",
    ".Complete/a",
    ".abc@1@host.tmp/a",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=[repr(name)[:16] for name in BAD_NAMES])
def test_names_that_are_none_are_refused(name, accelerator, tmp_path):
    accelerator.save_state(tmp_path / "c")
    (tmp_path / "c/manifest.json").write_text(manifest_naming(name))
    with pytest.raises(CheckpointError, match=r"c\b"):
        accelerator.load_state(tmp_path / "c")


ENTRY = digest_of(b"mine")
BAD_MANIFESTS = {
    "no JSON": b"{",
    "no UTF-8": b'{"format_version": 4, "files": {"\xff": 1}}',
    "UTF-16": json.dumps({"format_version": 4, "files": {}}).encode("utf-16"),
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "deep in it": b'{"format_version": 4, "files": ' + b'{"a":' * 100_000,
    "a long number": b'{"format_version": ' + b"9" * 5000 + b"}",
    "huge": b" " * (2**24 + 1),
    "a key twice": b'{"format_version": 4, "files": {}, "files": {}}',
    "a name twice": manifest_naming("a", "b").replace('"b"', '"a"').encode(),
    "no files": b'{"format_version": 4}',
    "more": b'{"format_version": 4, "files": {}, "more": 1}',
    "a version of another type": b'{"format_version": true, "files": {}}',
    "files of another type": b'{"format_version": 4, "files": ["a"]}',
    "an entry of another type": b'{"format_version": 4, "files": {"a": 1}}',
}
for field, values in {
    "bytes": [-1, 1.0, True, "1", None, 1e400],
    "crc32": [1, None, "", "A" * 8, "a" * 7, "a" * 16],
}.items():
    for value in values:
        entry = json.dumps(ENTRY | {field: value})
        BAD_MANIFESTS[f"{field} {value!r}"[:20]] = f'{{"format_version": 4, "files": {{"a": {entry}}}}}'.encode()


@pytest.mark.parametrize("content", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_a_manifest_that_is_damaged_is_refused_by_name(content, accelerator, tmp_path):
    accelerator.save_state(tmp_path / "c")
    (tmp_path / "c/manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        accelerator.load_state(tmp_path / "c")
    accelerator.save_state(tmp_path / "c")  # A run is not lost because a file of before is.
    accelerator.load_state(tmp_path / "c")


@pytest.mark.parametrize(("version", "age"), [(1, "older"), (2, "older"), (3, "older"), (5, "newer")])
def test_another_format_is_refused_in_a_line_that_names_folder_and_versions(version, age, accelerator, tmp_path):
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    content = json.loads((folder / "manifest.json").read_text())
    content["format_version"] = version
    if version == 1:  # which did not say so
        content = {name: {"bytes": 4, "sha256": "a" * 64} for name in content["files"]}
    (folder / "manifest.json").write_text(json.dumps(content))
    line = f"{folder} is a checkpoint in an? {age} format, version {version}; this code reads version 4$"
    with pytest.raises(CheckpointError, match=line):
        accelerator.load_state(folder)


def test_a_checkpoint_of_another_format_is_not_skipped_for_an_older_one(tmp_path):
    accelerator = numbering(tmp_path)
    accelerator.save_state()
    accelerator.save_state()
    manifest = tmp_path / "checkpoints/checkpoint_1/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 4', '"format_version": 5'))
    with pytest.raises(CheckpointError, match="newer format"):
        accelerator.load_state()


@NEEDS_LINKS
def test_no_link_is_followed(accelerator, tmp_path):
    outside = tmp_path / "outside"
    accelerator.save_state(outside)
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    for name in ("model.safetensors", "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).symlink_to(outside / name)
        with pytest.raises(CheckpointError, match="no regular file"):
            accelerator.load_state(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    (folder / ".complete").symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    for use in (accelerator.load_state, accelerator.save_state):
        with pytest.raises(CheckpointError, match=r"\.complete is no folder"):
            use(folder)
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before


@NEEDS_LINKS
def test_a_file_that_the_manifest_does_not_name_is_not_read(accelerator, tmp_path):
    """A link to the weights of somebody else beside a manifest that is silent about it."""
    accelerator.save_state(tmp_path / "outside")
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    (folder / "model.safetensors").unlink()
    (folder / "manifest.json").unlink()
    checkpointing.write_manifest(folder)
    (folder / "model.safetensors").symlink_to(tmp_path / "outside/model.safetensors")
    with pytest.raises(CheckpointError, match="holds no"):
        accelerator.load_state(folder)


@NEEDS_LINKS
def test_a_save_writes_through_no_link_in_the_folder(accelerator, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    accelerator.save_state(folder)
    assert not (folder / "model.safetensors").is_symlink() and not list(outside.iterdir())

    def hook(models, weights, building):
        (Path(building) / "sub").mkdir()
        (Path(building) / "sub/extra").touch()

    accelerator.register_save_state_pre_hook(hook)
    (folder / "sub").symlink_to(outside)
    with pytest.raises(CheckpointError, match="sub is no folder"):
        accelerator.save_state(folder)
    assert not list(outside.iterdir())
    accelerator.load_state(folder)
    (folder / "sub").unlink()
    accelerator.save_state(folder)
    assert (folder / "sub/extra").exists()


def test_what_is_in_the_way_of_a_save_is_named_and_the_old_checkpoint_stays(accelerator, tmp_path):
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    (folder / "pytorch_model.bin").mkdir()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a folder"):
        accelerator.save_state(folder, safe_serialization=False)
    accelerator.load_state(folder)
    assert not list(folder.glob(".*"))


def test_a_missing_folder_is_named(accelerator, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        accelerator.load_state(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        accelerator.load_state(tmp_path / "file")


# Several checkpoints side by side


def numbering(folder, **config):
    forget_states()
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **config)
    return Accelerator(project_config=config, cpu=True)


def kept(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_what_was_just_written_is_never_pruned(tmp_path):
    accelerator = numbering(tmp_path)
    accelerator.project_configuration.iteration = 10
    accelerator.save_state()
    accelerator.save_state()
    accelerator = numbering(tmp_path, total_limit=2)  # a new run, that numbers from 0
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_0", "checkpoint_11"}
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_0", "checkpoint_1"}
    accelerator = numbering(tmp_path, total_limit=0)
    accelerator.project_configuration.iteration = 5
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_5"}


@NEEDS_LINKS
def test_links_are_no_numbered_checkpoints(accelerator, tmp_path):
    accelerator.save_state(tmp_path / "elsewhere")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "checkpoint_0").symlink_to(tmp_path / "elsewhere")
    accelerator = numbering(tmp_path)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        accelerator.load_state()
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()


def test_checkpoints_that_were_set_aside_as_damaged_do_not_count(tmp_path):
    folder = tmp_path / "checkpoints"
    assert not checkpointing.has_checkpoints(folder)
    for name in ("checkpoint_1.damaged-0123abcd", "checkpoint_text", "checkpoint_٣", "other_1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").touch()
    (folder / "checkpoint_3/.6f@7@host.tmp").mkdir(parents=True)
    (folder / "checkpoint_4").touch()
    assert not checkpointing.has_checkpoints(folder)
    (folder / "checkpoint_2/half").mkdir(parents=True)
    assert checkpointing.has_checkpoints(folder)
    assert [path.name for path in checkpointing.numbered(folder)] == ["checkpoint_3", "checkpoint_2"]


def test_a_changed_byte_is_found_in_every_block_of_a_file(accelerator, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_folder, "BLOCK_BYTES", 2**21)
    large = torch.nn.Linear(1024, 1200)
    accelerator.prepare(large)
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    path = folder / "model_1.safetensors"
    entry = json.loads((folder / "manifest.json").read_text())["files"][path.name]
    assert len(entry["crc32"]) == 3 * 8
    content = path.read_bytes()
    for place in (0, 2**21 - 1, 2**21, 2**22, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match=r"model_1\.safetensors is not what was saved"):
            accelerator.load_state(folder)
    path.write_bytes(content)
    accelerator.load_state(folder)


def test_checkpoints_load_with_and_without_the_fast_checksums(accelerator, monkeypatch, tmp_path):
    pytest.importorskip("isal")
    assert checkpoint_folder.fastest_crc32() is not zlib.crc32
    accelerator.save_state(tmp_path / "fast")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "isal", None)
        without.setitem(sys.modules, "isal.isal_zlib", None)
        assert checkpoint_folder.fastest_crc32() is zlib.crc32
        accelerator.load_state(tmp_path / "fast")
        accelerator.save_state(tmp_path / "plain")
    accelerator.load_state(tmp_path / "plain")


@NEEDS_LINKS
def test_a_link_that_a_hook_makes_is_refused_when_it_is_saved(accelerator, precious, tmp_path):
    """No load would accept it: what it leads to may be another file by then."""

    def hook(models, weights, building):
        (Path(building) / "extra").symlink_to(precious)

    accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(CheckpointError, match="extra is a symbolic link"):
        accelerator.save_state(tmp_path / "c")
    assert not checkpoint_folder.holds_checkpoint(tmp_path / "c") and precious.read_text() == "mine"
