"""glibc is asked to keep large blocks with the process, in the order and under the conditions that it needs."""

import platform

import pytest

from common import allocator, ladder
from common.args import parse_args
from common.start import prepare_process


@pytest.fixture
def glibc(monkeypatch):
    """A glibc that notes what mallopt is asked, and refuses what is in `refused`."""
    asked = []
    refused = set()

    def set_parameter(parameter, value):
        asked.append((parameter, value))
        return (parameter, value) not in refused

    monkeypatch.setattr(platform, "libc_ver", lambda *_: ("glibc", "2.36"))
    monkeypatch.setattr(allocator, "set_parameter", set_parameter)
    for variable in (*allocator.VARIABLES, "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(variable, raising=False)
    return asked, refused


WHOLE = (allocator.M_MMAP_THRESHOLD, 2**30)
OLD = (allocator.M_MMAP_THRESHOLD, 2**25)
TRIM = (allocator.M_TRIM_THRESHOLD, 2**31 - 1)
ARENAS = (allocator.M_ARENA_MAX, 1)


@pytest.mark.parametrize("refuses, asks", [([WHOLE], [WHOLE, OLD, ARENAS, TRIM]), ([WHOLE, OLD], [WHOLE, OLD])])
def test_an_older_glibc_is_asked_for_less_and_the_trim_threshold_is_never_set_alone(refuses, asks, glibc):
    asked, refused = glibc
    refused.update(refuses)
    allocator.keep_large_blocks()
    assert asked == asks


@pytest.mark.parametrize(
    ("variable", "value", "left_alone"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "100", True),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1", True),
        ("GLIBC_TUNABLES", "glibc.rtld.nns=4", False),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", True),
    ],
)
def test_allocator_settings_of_the_environment_are_left_alone(variable, value, left_alone, glibc, monkeypatch):
    asked, _ = glibc
    monkeypatch.setenv(variable, value)
    allocator.keep_large_blocks()
    assert (asked == []) is left_alone


@pytest.mark.parametrize(("flags", "asked"), [([], [WHOLE, ARENAS, TRIM]), (["--allocator", "system"], [])])
def test_a_run_on_a_cpu_keeps_blocks_unless_it_is_told_not_to(flags, asked, glibc):
    calls, _ = glibc
    args = parse_args(str(ladder.script("00_single_gpu")), ["--device", "cpu", *flags])
    assert calls == []  # Parsing changes nothing.
    assert prepare_process(args).device.type == "cpu" and args.device == "cpu"  # The flags stay as they were.
    assert calls == asked
