"""Questions about a network that is not of this repository: its memory, its speed on many GPUs, and its speed here.

Each question is a file, from its flags to its table:

    question   number               how it is found
    memory     bytes of a device    exact: torch's own DDP and FSDP take a step in a `simulated_training`, which runs
                                    `without_computing`, and `common.memory` counts the storages
    predict    operators and bytes  counted: `count`, in a step that runs `without_computing`, finds the costs
               seconds of a step    by a formula: `scaling` and `all_reduce`, of these costs and the published
                                    figures in `presets`
    measure    seconds of a step    measured: ranks train the network in turns (`benchmarks.harness.paired`)

`spec` loads the network, a `user_network.UserNetwork`. `strategies` are the rows of `memory` and `measure`. `units` are
the parts of a network that FSDP gathers one at a time, and `formats` are the numbers of the tables.
"""
