"""Whole or not there: files, whoever is killed while they are written."""

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
