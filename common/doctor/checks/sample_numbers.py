"""`Batch.samples`: whether ranks can be compared by the numbers of samples, and whether one was read twice."""

from common.doctor.record import Epoch

MIN_SAMPLES = 16  # fewer samples may have something in common, or come in one order, by chance
NO_NUMBERS = "the samples have no numbers, or the ranks have data sets of different sizes"


def are_numbered_alike(epochs: tuple[Epoch, ...]) -> bool:
    """True if the samples have numbers, in data sets of one length. Else NO_NUMBERS is the reason for not comparing."""
    lengths = {epoch.data_set_length for epoch in epochs}
    return len(lengths) == 1 and None not in lengths and all(epoch.samples for epoch in epochs)


def has_repeated(samples: list[int]) -> bool:
    return len(set(samples)) < len(samples)
