"""Whole or not there: files, whoever is killed while they are written."""

import os

import pytest

from common import files


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
    assert path.read_text(encoding="utf-8") == "é\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bytes", "note.txt"]


def test_a_link_and_permissions_stay_and_a_pipe_is_written_directly(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.touch(mode=0o640)
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_atomically(link, "new")
    files.write_atomically(pipe, "new")
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert target.read_text() == "new" and os.read(reader, 9) == b"new"
