"""Parts of a training with checkpoints, for the `train_full.py` of levels 03 and 04.

schedule    the steps after which all ranks save or stop
checks      refusals: of another training's checkpoint, of weights that are not finite
"""
