"""Every public name of the original is here, or is said to be out of scope, or serves the original alone."""

import enum
import importlib
import warnings

import pytest

pytest.importorskip("accelerate")

from tests.unit.accelerator import original_names
from tests.unit.accelerator.original_names import HERE, MISSING, STAND_IN, find_here, verdict

# Where a call that the original takes is not one that ours takes, and why.
OTHER_SIGNATURE = {
    "ClusterConfig": "a file's settings have defaults here, and no place among the others",
    "DataLoaderDispatcher": "`prepare_data_loader` makes it, by keywords",
    "save": "in `checkpointing`: there it is the function of `utils`, which is here too",
}


@pytest.fixture(scope="module")
def names() -> list[original_names.Name]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [name for module in original_names.modules() for name in original_names.public_names(module)]


def test_no_name_is_missing(names):
    assert [f"{name.module}.{name.name}" for name in names if verdict(name) == MISSING] == []


def test_the_table_is_what_the_script_makes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = original_names.table()
    assert original_names.TABLE.read_text(encoding="utf-8") == made, f"write it anew: {original_names.__doc__}"


def test_trackers_that_are_not_here_are_said_to_be_out_of_scope(names):
    trackers = {name.name: verdict(name) for name in names if name.module == "accelerate.tracking"}
    for name in ("AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker", "MLflowTracker", "TrackioTracker"):
        assert trackers[name] == STAND_IN, name
    assert trackers["WandBTracker"] == HERE


def test_calls_that_the_original_takes_are_taken_here(names):
    wrong = {}
    for name in names:
        if verdict(name) == HERE and not isinstance(name.value, enum.EnumType):
            reason = original_names.incompatible(name.value, find_here(name))
            if reason:
                wrong[name.name] = reason
    assert sorted(wrong) == sorted(OTHER_SIGNATURE), wrong


def test_what_is_out_of_scope_says_its_name_when_it_is_used(names):
    stand_ins = [name for name in names if verdict(name) == STAND_IN]
    assert len(stand_ins) > 100
    for name in stand_ins:
        with pytest.raises(NotImplementedError, match=name.name):
            find_here(name)()


def test_a_script_can_ask_whether_something_is_out_of_scope():
    utils = importlib.import_module("common.accelerator.utils")
    assert not isinstance(object(), utils.DeepSpeedPlugin)
    assert not isinstance(None, (utils.FullyShardedDataParallelPlugin, utils.MegatronLMPlugin))
    for question in ("is_deepspeed_available", "is_torch_xla_available", "is_fp8_available", "is_bnb_available"):
        assert getattr(utils, question)() is False


def test_questions_about_this_machine_have_the_originals_answers():
    theirs = importlib.import_module("accelerate.utils.imports")
    ours = importlib.import_module("common.accelerator.utils.imports")
    # Libraries that are out of scope here are "not there" even where somebody has installed them.
    for name in dir(theirs):
        in_scope = name not in ("is_pippy_available", "is_torchao_available", "is_bnb_available")
        if name.startswith("is_") and name.endswith("_available") and in_scope:
            assert bool(getattr(ours, name)()) == bool(getattr(theirs, name)()), name


def test_constants_are_the_originals():
    theirs = importlib.import_module("accelerate.utils.constants")
    ours = importlib.import_module("common.accelerator.utils.constants")
    for name, value in vars(theirs).items():
        if name.isupper():
            assert getattr(ours, name) == value, name


def test_versions_are_compared_as_numbers():
    from common.accelerator.utils import compare_versions, is_torch_version

    assert compare_versions("torch", ">=", "2.9") and is_torch_version("<", "1000.0")
    assert not is_torch_version("==", "2.9")
    with pytest.raises(ValueError, match="`operation` must be one of"):
        compare_versions("torch", "~=", "2.9")
