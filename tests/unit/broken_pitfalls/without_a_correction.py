"""What is called right is wrong: the detector finds the mistake in both."""

from common.pitfalls.set_epoch_forgotten import LEVELS, WORLD_SIZE, detect, measure, wrong

right = wrong

__all__ = ["LEVELS", "WORLD_SIZE", "detect", "measure", "right", "wrong"]
