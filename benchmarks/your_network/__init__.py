"""Questions about a network that is not of this repository: its memory, its speed on many GPUs, and its speed here.

`__main__` reads the question, and the `answer` of its module prints a table:

    memory     network → strategies, on a rank of a fake group → a step without_computing → common.memory
    predict    network → count, of a step without_computing → presets, the hardware → scaling, the model
    measure    network → ranks that train it in turns (benchmarks.harness.paired)

`network` loads the network, and has the parts of its training step. `settings` and `formats` are the rows of the
tables, and their numbers.
"""
