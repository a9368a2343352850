"""What the tests of the checks share: an epoch as the observers would note it."""

from common.doctor.record import Batch, Epoch


def epoch_of(order, content=lambda sample: (sample,), batch_size=4, length=1000, trained=True, dataset=0):
    """An epoch in which a rank reads these samples, and trains on each batch or evaluates it."""
    batches = []
    for first in range(0, len(order), batch_size):
        own = list(order[first : first + batch_size])
        contents = [content(sample) for sample in own]
        forwards = [len(own)] * trained
        batches.append(Batch(own, contents, len(batches) * trained, forwards=forwards, evaluated=not trained))
    return Epoch(dataset, length, range(length), complete=True, batches=batches)
