"""What goes wrong with a network of somebody else's. This imports no torch, so that `--help` answers at once."""


class StepFailed(Exception):
    """A step of somebody's network that failed, in one line: what failed, and why."""
