"""Questions about a network that is not of this repository: its memory, its speed here, and its speed on many GPUs.

Each question has a module, whose `answer` prints a table. It stands on:

    memory     strategies, units, without_computing     a step on each device, run but not computed
    predict    count (on without_computing), scaling    a step on many GPUs (`presets`), calculated
    measure    benchmarks.harness.paired                a step on this machine, timed

All of them load the network, and take its steps, by `network`.
"""
