"""IDX files: what is written is read back, and nothing that is not whole passes."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.idx import IdxError, read_idx, write_idx


@pytest.mark.parametrize("shape", [(3, 28, 28), (5,), (0,), (0, 28, 28), (1, 1, 1)])
def test_written_tensors_are_read_back(tmp_path, shape):
    values = torch.randint(256, shape, dtype=torch.uint8)
    write_idx(tmp_path / "file", values)
    assert torch.equal(read_idx(tmp_path / "file", len(shape)), values)


def _labels(tmp_path):
    write_idx(tmp_path / "labels", torch.arange(10, dtype=torch.uint8))
    return tmp_path / "labels"


@pytest.mark.parametrize("length", [0, 3, 7, 8, 17])
def test_a_truncated_file_is_refused_by_name(tmp_path, length):
    path = _labels(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(IdxError, match=r"labels is truncated"):
        read_idx(path, 1)


def test_a_wrong_magic_number_is_named(tmp_path):
    with pytest.raises(IdxError, match="labels has the magic number 2049, not 2051"):
        read_idx(_labels(tmp_path), 3)


def test_bytes_after_the_end_are_refused(tmp_path):
    path = _labels(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(IdxError, match="too long"):
        read_idx(path, 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(content=st.binary(max_size=60), sizes=st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3))
def test_any_bytes_are_a_tensor_or_an_idx_error(tmp_path_factory, content, sizes):
    path = tmp_path_factory.getbasetemp() / "fuzz"
    for prefix in (b"", struct.pack(">I", 2049), struct.pack(">4I", 2051, *sizes)):
        path.write_bytes(prefix + content)
        for dimensions in (1, 3):
            try:
                values = read_idx(path, dimensions)
            except IdxError:
                continue
            assert values.dim() == dimensions and values.numel() <= len(content) + 12
