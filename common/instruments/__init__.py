"""Instruments: they measure a training, and are attached to it from outside.

A lesson (a level's train.py) has the data, the model, the loop and the evaluation. Two of its lines are for measuring:

    with measured(args, model, train_set, test_set) as report:  # attaches the instruments
        result = report(loss, eval_loss, accuracy, evaluated)   # after each evaluation; at level 04 once, at the end

`clock` counts steps and takes the time by hooks that torch calls, so the loop counts nothing. `result` makes the
printed lines and the files, on rank 0. `flags` are those for comparing, for measuring and for these files. No step of
the training depends on what is measured. A loss that is not finite is refused where it is reported, and ends the run.
"""

from common.instruments.measured import measured

__all__ = ["measured"]
