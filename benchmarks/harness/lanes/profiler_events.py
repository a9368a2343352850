"""The events of torch's profiler, with times in seconds."""

from typing import NamedTuple


class Event(NamedTuple):
    """An operation or a phase on a thread, in seconds by the profiler's own clock."""

    start: float
    end: float
    name: str
    thread: int


def in_order(events: list) -> list[Event]:
    """The profiler's events, in the order in which they began."""
    seen = []
    for event in events:
        seen.append(Event(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name, event.thread))
    return sorted(seen)


def within(outer: Event, events: list[Event]) -> list[Event]:
    """The events that began while `outer` was under way."""
    return [event for event in events if outer.start <= event.start < outer.end]
