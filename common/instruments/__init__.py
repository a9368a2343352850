"""Instruments for a training, attached from outside: clock, progress bar, memory, the result and its JSON.

    args = prepare_process(parse_args(__file__))         # once, before torch computes anything
    with measured(args, model, train_set, test_set) as report:
        ...                                              # a training loop that knows nothing of being measured
        result = report(loss, eval_loss, accuracy, evaluated)   # after each evaluation

`clock` counts steps and takes the time by hooks that torch calls, `result` is what is printed and written, `flags` are
those that serve comparing and measuring, and `start` prepares a process.
"""

from common.instruments.measured import measured
from common.instruments.start import prepare_process

__all__ = ["measured", "prepare_process"]
