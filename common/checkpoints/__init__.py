"""Checkpoints of a long training: the steps at which all ranks save or stop, and what is refused."""
