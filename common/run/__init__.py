"""The surroundings of the training that a train.py shows: plan, progress, checkpoints, an orderly end, the result."""

from common.run.run import Run

__all__ = ["Run"]
