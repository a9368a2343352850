"""Ranks for tests: those that the benchmarks use too."""

from benchmarks.workers import RankFailed, Ranks, free_port, ranks

__all__ = ["RankFailed", "Ranks", "free_port", "ranks"]
