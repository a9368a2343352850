"""Files: where `torch.save` puts them, and the keys of the state dicts in them."""

import os

import pytest
import torch

from common.doctor.checks import files
from common.doctor.record import Network, Record, Save
from common.doctor.results import Finding, Passed


def test_files_of_one_name_in_two_folders_are_two(recorder, tmp_path):
    files.observe_saves(recorder)
    paths = [tmp_path / folder / "last.pt" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        torch.save({"model": {"w": torch.ones(1), "_extra_state": b""}}, path)
    torch.save({}, os.devnull)
    assert [(save.path, save.state_dicts) for save in recorder.record.saves] == [(str(path), [["w"]]) for path in paths]


@pytest.mark.parametrize(
    "keys, kind",
    [
        (["_orig_mod.module.w", "_orig_mod.module.buffer"], Finding),
        (["module.of_another"], Passed),
        (["n_averaged", "module.w"], Passed),
        (["n_averaged", "module.module.w"], Finding),
    ],
)
def test_the_keys_of_a_wrapped_network_may_not_have_the_prefix(keys, kind):
    networks = [Network(wrapped=True, shapes={"w": (1,)}), Network(shapes={"of_another": (1,)})]
    assert isinstance(files.check_keys([Record(0, saves=[Save("last.pt", [keys])], networks=networks)]), kind)
