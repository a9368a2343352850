"""What is called wrong is right: the detector has nothing to find."""

from common.pitfalls.set_epoch_forgotten import LEVELS, WORLD_SIZE, detect, measure, right

wrong = right

__all__ = ["LEVELS", "WORLD_SIZE", "detect", "measure", "right", "wrong"]
