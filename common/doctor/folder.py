"""The files by which the doctor and the ranks that it watches talk."""

from pathlib import Path


class Files:
    """The files of one rank.

    Attributes:
        record: its observations.
        progress: the numbers of its events and of its optimizer steps until now.
        log: what it has printed.
        stop: the doctor makes it, once for all ranks, and all stop.
        stopped: the rank makes it when it has stopped, and its last record is written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.record = folder / f"rank{rank}.pickle"
        self.progress = folder / f"rank{rank}.progress"
        self.log = folder / f"rank{rank}.log"
        self.stop = folder / "stop"
        self.stopped = folder / f"rank{rank}.stopped"
