"""Questions about a network that is not of this repository: its memory, its speed on many GPUs, and its speed here.

`__main__` reads the question, and the `answer` of its module prints a table:

    question   number               how it is found
    memory     bytes of a device    exact: torch's own DDP and FSDP take a step `without_computing`, as rank 0 of a
                                    group whose other ranks are not there, and `common.memory` counts the storages;
                                    DataParallel is the emulation of `common.small.data_parallel`
    predict    operators and bytes  counted: `count`, in a step `without_computing`
               seconds of a step    by a formula: `scaling`, of these counts and the published figures in `presets`
    measure    seconds of a step    measured: ranks train the network in turns (`benchmarks.harness.paired`)

`user_network` loads the network, and has the parts of its training step. `strategies` wraps it for several devices, and
`units` are the parts that FSDP gathers one at a time. `settings` and `formats` are the rows of the tables, and their
numbers.
"""
