"""Questions about a network that is not of this repository: its memory, its speed on many GPUs, and its speed here.

Each question is a file, from its flags to its table:

    question   number               how it is found
    memory     bytes of a device    exact: torch's own DDP and FSDP, and the emulation of DataParallel, take a step in
                                    a `simulated_training`, which runs `without_computing`; `common.memory` counts
    predict    operators and bytes  counted: `count`, in a step that runs `without_computing`, finds the costs
               seconds of a step    by a formula: `scaling` and `all_reduce`, of these costs and the published
                                    figures in `presets`
    measure    seconds of a step    measured: ranks train the network in turns (`benchmarks.harness.paired`)

`spec` loads the network, a `user_network.UserNetwork`; its failures are `errors`. `strategies` has the rows of `memory`
and `measure`. `units` are the parts of a network that FSDP gathers one at a time, and `fused_attention` is the one
operator that `without_computing` has to replace.
"""
