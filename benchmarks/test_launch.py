"""What starting costs."""

from benchmarks import launch
from benchmarks.overhead import skipped
from benchmarks.paired import take_turns


def test_import(in_turns, keep, quick):
    contestants = launch.imports()
    take_turns(contestants, 0)  # uncounted: it brings the files into the page cache
    samples = in_turns(contestants, 1 if quick else 3)
    keep(launch.import_record(samples) | {"skipped": skipped()})


def test_from_the_command_to_the_first_step(in_turns, keep, quick, data_flags, tmp_path):
    samples = in_turns(launch.launches(data_flags, tmp_path), 1 if quick else 3)
    keep(launch.launch_record(samples) | {"skipped": skipped()})
