"""Instruments: what measures a training, and is attached to it from outside.

A lesson (a level's train.py) has the data, the model, the loop and the evaluation, and three lines of the instruments:

    args = prepare_process(parse_args(__file__))                # `start`: flags fitted to the machine, cores, threads
    with measured(args, model, train_set, test_set) as report:  # `measured`: attaches the rest
        result = report(loss, eval_loss, accuracy, evaluated)   # after each evaluation

Everything else stays here. `clock` counts steps and takes the time by hooks that torch calls, so the loop counts
nothing. `result` makes the printed lines and the files, on rank 0. `flags` are those for comparing and measuring. The
training uses nothing that is measured: without the `with` block it ends with the same weights.
"""

from common.instruments.measured import measured
from common.instruments.start import prepare_process

__all__ = ["measured", "prepare_process"]
