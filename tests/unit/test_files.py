"""Whole or not there: files, whoever is killed while they are written."""

import os
import stat
import subprocess

import pytest

from common import files

ON_POSIX = pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions, links and pipes")


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


@ON_POSIX
def test_permissions_links_and_pipes_stay(tmp_path):
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
    (tmp_path / "astray").symlink_to("missing/file")
    assert files.can_be_written(tmp_path / "link") and not files.can_be_written(tmp_path / "astray")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        files.write_atomically(tmp_path / "folder", "")
