"""A loop knows its last batch, and whose turn it is, whatever other loops were begun in it or left early."""

import copy
import pickle

import pytest
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.data_loader import prepare_data_loader
from common.accelerator.state import GradientState
from common.accelerator.utils import DataLoaderConfiguration
from tests.toys import Numbers
from tests.unit.accelerator.several_processes import on_ranks


def test_break_exceptions_and_nesting_leave_no_stale_state():
    # https://github.com/huggingface/accelerate/issues/1050 and /pull/4248
    state = GradientState()
    outer = prepare_data_loader(DataLoader(Numbers(3)))
    inner = prepare_data_loader(DataLoader(Numbers(3)))
    assert not state.in_dataloader
    ends = []
    for _ in outer:
        for _ in inner:
            assert state.active_dataloader is inner
            break
        assert state.active_dataloader is outer
        ends.append(state.end_of_dataloader)
    assert ends == [False, False, True]
    with pytest.raises(RuntimeError, match="oops"):
        for step, _ in enumerate(outer):
            if step == 2:
                assert state.end_of_dataloader
                raise RuntimeError("oops")
    assert not state.in_dataloader and not state.end_of_dataloader and not outer.end_of_dataloader


def looked_at_within(accelerator, samples):
    """The rows gathered in each step of a loop that also looks at the first batch, and whether a window ends there."""
    loader = accelerator.prepare(DataLoader(range(samples)))
    gathered = []
    syncs = []
    for batch in loader:
        assert int(next(iter(loader))) == accelerator.process_index
        with accelerator.accumulate():
            gathered.append(accelerator.gather_for_metrics(batch).tolist())
            syncs.append(accelerator.sync_gradients)
    return {"gathered": gathered, "syncs": syncs}


@pytest.mark.parametrize(("samples", "last"), [(6, [4, 5]), (5, [4])])
def test_a_look_at_the_first_batch_in_the_loop_leaves_the_last_step_known(samples, last):
    for steps in on_ranks(2, looked_at_within, samples, gradient_accumulation_steps=2):
        assert steps == {"gathered": [[0, 1], [2, 3], last], "syncs": [False, True, True]}


def test_workers_that_stay_read_for_the_pass_that_began_last():
    loader = prepare_data_loader(DataLoader(range(10), 2, num_workers=1, persistent_workers=True))
    seen = []  # as in the original
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            assert next(iter(loader)).tolist() == [0, 1]
    assert seen == [[0, 1], [2, 3], [4, 5], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_the_last_batch_of_a_copied_loader_ends_its_window(copied):
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Numbers(3), batch_size=1))
    for _ in loader:
        copy_of_loader = copied(loader)
    assert not copy_of_loader.end_of_dataloader and copy_of_loader.state_dict()["steps_done"] == 0
    ends = []
    for _ in copy_of_loader:
        with accelerator.accumulate():
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True, True]
