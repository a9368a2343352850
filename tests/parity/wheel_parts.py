"""The parts that run here of wheel scripts that do not run as a whole, on CPUs on accelerate itself or on the core.

    python -m tests.parity.wheel_parts NAME core|original

On CPUs, `test_ddp_comm_hook` gives DDP device ids, which DDP refuses. `test_distributed_data_loop` joins uneven inputs,
which accelerate does on GPUs only: it hangs. Resuming a loader needs torchdata there. `test_ops` also tries debug
mode, which the core does not have.
"""

import functools
import importlib
import sys
from unittest import mock

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from tests import alias

SCRIPTS = "accelerate.test_utils.scripts"


def ddp_comm_hook() -> None:
    """The whole script, with a DDP that takes no notice of device ids."""
    script = importlib.import_module(f"{SCRIPTS}.test_ddp_comm_hook")
    ddp = torch.nn.parallel.DistributedDataParallel

    class WithoutDeviceIds(ddp):
        def __init__(self, module, device_ids=None, output_device=None, **kwargs) -> None:
            super().__init__(module, **kwargs)

    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", WithoutDeviceIds):
        script.main()


def distributed_data_loop() -> None:
    """What does not join uneven inputs and needs no torchdata."""
    script = importlib.import_module(f"{SCRIPTS}.test_distributed_data_loop")
    accelerator = script.create_accelerator()
    torch.manual_seed(accelerator.process_index)
    script.test_default_ensures_even_batch_sizes()
    script.test_can_disable_even_batches()
    script.test_pickle_accelerator()
    dataset = script.DummyDataset()
    make = functools.partial(DataLoader, dataset, num_workers=2)
    sampler = BatchSampler(RandomSampler(dataset), batch_size=script.BATCH_SIZE, drop_last=False)
    script.test_data_loader(make(shuffle=False, batch_size=script.BATCH_SIZE), accelerator)
    script.test_data_loader(make(shuffle=True, batch_size=script.BATCH_SIZE), accelerator)
    script.test_data_loader(make(batch_sampler=sampler), accelerator)
    script.test_data_loader(make(sampler=sampler, batch_size=None, collate_fn=default_collate), accelerator)
    accelerator.end_training()


def ops() -> None:
    """The whole script but for debug mode."""
    script = importlib.import_module(f"{SCRIPTS}.test_ops")
    with mock.patch.object(script, "test_op_checker"):
        script.main()


PARTS = {
    "ddp_comm_hook": ddp_comm_hook,
    "distributed_data_loop": distributed_data_loop,
    "ops": ops,
}


def main() -> None:
    name, library = sys.argv[1:]
    if library == "core":
        alias.install()
    PARTS[name]()


if __name__ == "__main__":
    main()
