"""Whole or not there: files and folders, whoever is killed while they are written."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common import files

ON_POSIX = pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions, links or processes")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "note.txt"
    files.write_atomically(path, "é\n")
    files.write_atomically(tmp_path / "bytes", b"\x00")
    assert path.read_bytes() == "é\n".encode() and (tmp_path / "bytes").read_bytes() == b"\x00"
    with pytest.raises(KeyError), files.atomic_write(path) as draft:
        draft.write_text("half")
        raise KeyError
    with pytest.raises(FileNotFoundError), files.atomic_write(path):
        pass  # nothing was written
    assert path.read_text(encoding="utf-8") == "é\n" and names(tmp_path) == ["bytes", "note.txt"]


@ON_POSIX
def test_permissions_are_kept_links_are_followed_and_devices_are_not_replaced(tmp_path):
    path = tmp_path / "real"
    path.write_text("old")
    path.chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    files.write_atomically(tmp_path / "link", "new")
    assert path.read_text() == "new" and (tmp_path / "link").is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE)
    files.write_atomically(tmp_path / "pipe", "through")
    assert reader.communicate()[0] == b"through"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        files.write_atomically(tmp_path / "folder", "")


def draft_of(process: int, folder: Path, host: str | None = None, name: str = "a") -> Path:
    return folder / f".{name}@{process}@{host or socket.gethostname()}.tmp"


@ON_POSIX
def test_only_drafts_of_dead_processes_of_this_machine_are_removed(tmp_path):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own = files.new_draft(tmp_path)
    predecessor = draft_of(os.getpid(), tmp_path)  # of a process that had this one's number before
    abandoned = draft_of(dead.pid, tmp_path)
    others = [draft_of(living.pid, tmp_path), draft_of(dead.pid, tmp_path, "elsewhere"), tmp_path / ".a@b@c.tmp"]
    for folder in (own, predecessor, abandoned, *others):
        folder.mkdir()
        (folder / "half").touch()
    files.remove_abandoned_drafts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own, *others])
    living.communicate()
    files.new_draft(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own, *others[1:]])


def test_a_folder_takes_the_place_of_another_and_goes_as_a_whole(tmp_path, monkeypatch):
    place = tmp_path / "place"
    for content in ("first", "second"):
        draft = files.new_draft(tmp_path)
        draft.mkdir()
        (draft / content).touch()
        files.replace_folder(draft, place)
        assert names(tmp_path) == ["place"] and names(place) == [content]
    with pytest.raises(FileNotFoundError):
        files.replace_folder(tmp_path / "nowhere", place)
    assert names(place) == ["second"]
    files.remove_folder(place)
    files.remove_folder(place)
    assert names(tmp_path) == []
