"""What goes wrong with a network of somebody else's."""


class StepFailed(Exception):
    """A step of somebody's network that failed, in one line: what failed, and why."""
