"""Questions about a network that is not of this repository: its memory, its speed on many GPUs, and its speed here.

`__main__` reads the question, `spec` loads the network, a `user_network.UserNetwork`, and the `answer` of the
question's module prints a table:

    question   number               how it is found
    memory     bytes of a device    exact: torch's own DDP and FSDP take a step `without_computing`, as rank 0 of a
                                    group whose other ranks are not there, and `common.memory` counts the storages;
                                    DataParallel is the emulation of `common.small.data_parallel`
    predict    operators and bytes  counted: `count`, in a step `without_computing`, finds the costs
               seconds of a step    by a formula: `scaling` and `all_reduce`, of these costs and the published
                                    figures in `presets`
    measure    seconds of a step    measured: ranks train the network in turns (`benchmarks.harness.paired`)

`strategies` wraps the network for several devices, and `units` are the parts that FSDP gathers one at a time.
`settings` and `formats` are the rows of the tables, and their numbers.
"""
