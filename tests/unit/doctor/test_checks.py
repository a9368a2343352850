"""The checks of the doctor, on records that are made by hand."""

import functools
import re
from pathlib import Path

import pytest
import torch

from common.doctor import __main__ as program
from common.doctor import checks, launch, report, run_script
from common.doctor.checks import end, evaluations, files, optimizers, samples, weights
from common.doctor.checks.random_numbers import check_draws, note_draws
from common.doctor.record import Batch, Call, End, Epoch, Network, Record, Save, Step
from common.doctor.results import Finding, Passed, Skipped

LOST = End("lost", "train.py:9: RuntimeError: [/third_party/gloo/pair.cc:545] Read error")
STOPPED = End("stopped", "no rank made progress for 60 s")
HEALTHY = dict.fromkeys(checks.OF_HEALTH, Passed())
RAISED_FROM = RuntimeError("step 9 failed")
RAISED_FROM.__cause__ = RuntimeError(LOST.text)


def trained() -> list[Record]:
    return [Record(rank, steps=[Step([0.1], 1)] * 8, networks=[Network(forwards=1)]) for rank in range(2)]


APART = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0])]  # the weights of rank 0 and of rank 1
EQUAL = [torch.tensor([3.0, 3.0])] * 2


@pytest.mark.parametrize(
    "by_step, rates_of_rank_1, wrapped, exchanged, kind",
    [
        pytest.param([APART, EQUAL, APART], [0.1] * 8, False, [], Skipped, id="maybe averaged"),
        pytest.param([EQUAL, APART, APART], [0.1] * 8, False, [], Finding, id="not averaged again"),
        pytest.param([APART, APART], [0.1] * 8, False, [8], Skipped, id="maybe averaged after the last step"),
        pytest.param([APART], [0.1] * 9, True, [], Finding, id="rank 1 makes steps alone"),
        pytest.param([APART], [0.2] * 8, True, [], Skipped, id="explained by another learning rate"),
        pytest.param([APART], [0.2] * 8, False, range(8), Skipped, id="not wrapped, but gradients are exchanged"),
        pytest.param([APART], [0.2] * 8, False, [0, 4], Finding, id="not wrapped, and predictions are gathered"),
    ],
)
def test_weights_differ_by_mistake_or_for_a_reason(by_step, rates_of_rank_1, wrapped, exchanged, kind):
    records = trained()
    records[0].networks[0].wrapped = wrapped
    records[0].networks[0].trained_numbers = 2
    records[0].exchanged.update(dict.fromkeys(exchanged, 2))
    records[1].steps = [Step([rate], 1) for rate in rates_of_rank_1]
    for step, of_ranks in enumerate(by_step, start=1):
        for one, tensor in zip(records, of_ranks, strict=True):
            one.networks[0].weights[step] = {"w": tensor}
    assert isinstance(weights.check_same_weights(records), kind)


def shuffled(seed: int) -> list[int]:
    return torch.randperm(1000, generator=torch.Generator().manual_seed(seed)).tolist()


def epoch_of(orders, content=lambda sample: (sample,), batch_size=4, length=1000, trained=True, dataset=0):
    """An epoch in which a rank reads these samples, and trains on each batch or evaluates it."""
    batches = []
    for first in range(0, len(orders), batch_size):
        own = list(orders[first : first + batch_size])
        contents = [content(sample) for sample in own]
        forwards = [len(own)] * trained
        batches.append(Batch(own, contents, len(batches) * trained, forwards=forwards, evaluated=not trained))
    return Epoch(dataset, length, range(length), complete=True, batches=batches)


@pytest.mark.parametrize("different_step, kind", [(4, Finding), (5, Skipped)])
def test_steps_are_compared_up_to_the_last_batch_of_the_rank_that_has_fewer(different_step, kind):
    records = trained()
    records[0].epochs = [epoch_of(range(24))]
    records[1].epochs = [epoch_of(range(20))]
    records[1].steps[different_step - 1] = Step([0.2], 1)
    for one in records:
        one.networks[0].statistics[different_step] = {"mean": APART[one.rank]}
    assert isinstance(optimizers.check_learning_rates(records), kind)
    assert isinstance(weights.check_same_statistics(records), kind)


def test_an_uneven_epoch_explains_a_hang_in_it_but_not_under_join():
    records = [Record(rank, end=STOPPED, epochs=[epoch_of(range(count))]) for rank, count in enumerate((20, 20, 24))]
    records[0].epochs[0].complete = False  # a batch behind
    assert end.check_end(records).pitfall == "uneven_inputs"
    records[0].has_joined = True
    assert end.check_end(records).pitfall is None
    records = [Record(rank, end=STOPPED, epochs=[epoch_of(range(24 - rank * 4), trained=False)]) for rank in range(2)]
    assert "in evaluation" not in end.check_end(records).text
    records[0].epochs[0].complete = False
    assert end.check_end(records).text.endswith("in evaluation 0 rank 0 has 6 batches, rank 1 has 5 batches")


# For each epoch, what each rank reads, in order.
HALVES = [(shuffled(epoch)[::2], shuffled(epoch)[1::2]) for epoch in range(4)]
ALL = [(shuffled(0), shuffled(0))]
OWN = [(shuffled(0), shuffled(1))]
TWO_OF_FOUR = [[shuffled(0)[rank % 2 :: 2] for rank in range(4)]]
DRAWN = [(2 * shuffled(0), 2 * shuffled(1))]
# The contents of a sample: an image and a label, where another rank or another epoch reads it.
CONTENTS = {
    "same": lambda rank, epoch, sample: (sample, sample % 20 == 0),
    "of each rank": lambda rank, epoch, sample: (1000 * rank + sample, sample % 20 == rank),
    "augmented": lambda rank, epoch, sample: (9000 * rank + 1000 * epoch + sample, sample % 7),
    "new": lambda rank, epoch, sample: (9000 * rank + 1000 * epoch + sample, (sample + rank + epoch) % 7),
}


@pytest.mark.parametrize(
    "epochs, kind, training, pitfall, of_datasets",
    [
        pytest.param(HALVES, "same", Passed, None, Passed, id="parts"),
        pytest.param(HALVES, "augmented", Passed, None, Passed, id="parts, augmented"),
        pytest.param(HALVES, "new", Passed, None, Skipped, id="parts, new with each read"),
        pytest.param(HALVES, "of each rank", Passed, None, Finding, id="parts of its own data"),
        pytest.param(ALL, "same", Finding, None, Skipped, id="all"),
        pytest.param(OWN, "same", Finding, "different_orders", Skipped, id="its own order"),
        pytest.param(OWN, "of each rank", Skipped, None, Skipped, id="its own order of its own data"),
        pytest.param(TWO_OF_FOUR, "same", Skipped, None, Skipped, id="two parts for four ranks"),
        pytest.param(DRAWN, "same", Skipped, None, Skipped, id="with replacement"),
    ],
)
def test_samples_are_compared_as_the_tables_of_the_checks_say(epochs, kind, training, pitfall, of_datasets):
    records = [Record(rank) for rank in range(len(epochs[0]))]
    for number, orders in enumerate(epochs):
        for one, order in zip(records, orders, strict=True):
            one.epochs.append(epoch_of(order, functools.partial(CONTENTS[kind], one.rank, number)))
    result = samples.check_training_samples(records)
    assert (type(result), getattr(result, "pitfall", None)) == (training, pitfall)
    assert isinstance(samples.check_datasets(records), of_datasets)
    records[0].epochs[0].available = range(9000)  # of which few were read, so that none was read twice by chance
    assert samples.check_training_samples(records) != Passed()


def test_datasets_are_compared_where_their_numbers_were_dealt_out():
    records = [Record(rank) for rank in range(2)]
    for one in records:  # each trains first on data of its own, in an order of its own
        content = functools.partial(CONTENTS["of each rank"], one.rank, 0)
        one.epochs = [epoch_of(shuffled(one.rank + 2 * number), content) for number in range(2)]
        one.epochs += [epoch_of(halves[one.rank], dataset=1) for halves in HALVES]
    assert samples.check_datasets(records) == Passed()


@pytest.mark.parametrize("seeds, kind", [((0, 0), Finding), ((0, 1), Passed)])
def test_two_datasets_that_are_read_in_turn_are_shuffled_anew_each(seeds, kind):
    epochs = [epoch_of(shuffled(seed), dataset=dataset) for seed in seeds for dataset in range(2)]
    dry_run = epoch_of(shuffled(0)[:16], batch_size=16)
    assert isinstance(samples.check_orders([Record(0, epochs=[dry_run, *epochs, dry_run])]), kind)


@pytest.mark.parametrize("forwards", [[], [2, 2], [0]])
def test_who_reads_all_samples_may_train_on_every_other_batch_or_on_a_part_of_it(forwards):
    records = [Record(rank, epochs=[epoch_of(shuffled(0))]) for rank in range(2)]
    for batch in records[1].epochs[0].batches[::2]:
        batch.forwards = forwards
    assert isinstance(samples.check_training_samples(records), Skipped)


@pytest.mark.parametrize(
    "of_rank_0, of_rank_1, kind, counts",
    [
        pytest.param([[0, 2, 4]], [[1, 3, 5]], Passed, "", id="each once"),
        pytest.param([[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]], Passed, "", id="all on each rank"),
        pytest.param([[0, 2, 4]], [[5, 1, 3, 0]], Finding, "1 of 6 samples are", id="filled up"),
        pytest.param([[0, 2, 4]], [[5, 1, 3, 5]], Skipped, "", id="filled up by its own"),
        pytest.param([[0, 2, 4]], [[2, 5, 1, 3]], Skipped, "", id="no padding"),
        pytest.param([[0, 1, 2, 3]], [[0, 1, 2, 3]], Skipped, "", id="dropped on each rank"),
        pytest.param([[0, 2, 4], [0, 1, 2, 3]], [[1, 3, 5]], Skipped, "", id="a further one on rank 0"),
    ],
)
def test_evaluations_are_compared_as_the_table_of_the_check_says(of_rank_0, of_rank_1, kind, counts):
    records = [Record(0), Record(1)]
    for one, orders in zip(records, (of_rank_0, of_rank_1), strict=True):
        one.epochs = [epoch_of(order, batch_size=1, length=6, trained=False) for order in orders]
    result = evaluations.check_evaluation_samples(records)
    assert isinstance(result, kind)
    assert counts in getattr(result, "text", "")
    records[0].epochs.append(epoch_of(range(8)))  # the data are trained on too
    assert isinstance(evaluations.check_evaluation_samples(records), Skipped)
    for epoch in records[0].epochs + records[1].epochs:
        epoch.batches[-1].steps = 1  # as in a training that reads two loaders at once
    assert isinstance(evaluations.check_evaluation_samples(records), Skipped)


@pytest.mark.parametrize(
    "keys, kind",
    [
        (["_orig_mod.module.w", "_orig_mod.module.buffer"], Finding),
        (["module.of_another"], Passed),
        (["n_averaged", "module.w"], Passed),
        (["n_averaged", "module.module.w"], Finding),
    ],
)
def test_the_keys_of_a_wrapped_network_may_not_have_the_prefix(keys, kind):
    networks = [Network(wrapped=True, shapes={"w": (1,)}), Network(shapes={"of_another": (1,)})]
    assert isinstance(files.check_keys([Record(0, saves=[Save("last.pt", [keys])], networks=networks)]), kind)


def test_the_first_draws_of_each_source_are_recorded():
    record = Record(0, steps=[Step([0.1], 1)])
    for source in ["batches"] * 100 + ["forwards in training"]:
        note_draws(record, source, {"torch": 1}, torch.device("cpu"))
    assert [len(states) for states in record.draws.values()] == [64, 1]


@pytest.mark.parametrize("of_ranks, kind", [((1, 2, 2), Finding), ((1, 1, 2), Finding), ((1, 2, 3), Passed)])
def test_no_two_ranks_draw_alike(of_ranks, kind):
    networks = [Network(forwards=1)]
    records = [Record(0, draws={("batches", "torch"): [state]}, networks=networks) for state in of_ranks]
    assert isinstance(check_draws(records), kind)
    records[0].networks = [Network(forwards=1, shapes={"of another stage": (1,)})]
    assert isinstance(check_draws(records), Skipped)


@pytest.mark.parametrize("micro_batches, kind", [([1, 0, 3, 0, 3], Finding), ([3, 3, 3], Passed), ([1, 3], Skipped)])
def test_the_first_window_of_accumulation_is_as_long_as_the_next(micro_batches, kind):
    steps_of = [Step([0.1], count) for count in micro_batches]
    first = Record(0, steps=steps_of, networks=[Network(forwards=12)])
    assert isinstance(optimizers.check_accumulation([first]), kind)
    first.networks.append(Network(forwards=12))
    assert optimizers.check_accumulation([first]).reason.endswith("but 2 were trained")


@pytest.mark.parametrize("rates, kind", [([0.2, 0.1, 0], Passed), ([0.1, 0, 0, 0], Finding), ([0, None], Passed)])
def test_a_schedule_lasts_as_long_as_the_training(rates, kind):
    of_another = [Step([0.5, 0.5], 1, optimizer=1)] * 3  # which stays as it is
    of_one = [Step([rate], 1) for rate in rates]
    assert isinstance(optimizers.check_schedule([Record(0, steps=of_one + of_another)]), kind)


@pytest.mark.parametrize(
    "of_rank_0, of_rank_1, found",
    [
        (LOST, End("crash", "ValueError: no disk"), "rank 1 crashed after at least 0 steps: ValueError: no disk"),
        (LOST, End("finished"), f"rank 0 could not communicate ({LOST.text}), rank 1 has ended"),
        (STOPPED, End("crash", "E" * 999 + ": no disk"), f"rank 1 crashed after at least 0 steps: {'E' * 150} … E"),
        (STOPPED, STOPPED, "no rank made progress for 60 s: rank 0 is in t.py:7, rank 1 was stopped outside"),
    ],
)
def test_an_end_is_explained_by_the_rank_that_did_not_lose_another_one(of_rank_0, of_rank_1, found):
    records = [Record(0, end=of_rank_0, waits_in="t.py:7"), Record(1, end=of_rank_1)]
    for one in records:  # rank 1 has a batch more
        one.epochs.append(epoch_of(range(4 + 4 * one.rank)))
        one.epochs[0].complete = one.rank == 0
    assert end.check_end(records).text.startswith(found)
    assert end.check_end([Record(0)]).reason.startswith("rank 0 left by os._exit")
    records[1].end = End("steps")
    assert end.check_end(records) == Skipped("--steps ended it")


@pytest.mark.parametrize(
    "noted, exit_code, why_stopped, printed, reason",
    [
        (End("crash", "ValueError: no disk"), -9, "no progress", "DistNetworkError", "crash"),
        (End("crash", run_script.one_line(RAISED_FROM)), 1, "", "", "lost"),
        (End(), -9, "no progress", "", "stopped"),
        (End(), -9, "", "caught DistNetworkError", "crash"),
        (End(), -6, "", "c10::DistBackendError", "lost"),
        (End(), -6, "", "c10::DistBackendError: ncclInvalidUsage: Duplicate GPU", "crash"),
        (End("finished"), -6, "", "c10::DistBackendError", "crash"),
        (End("steps"), -6, "", "", "steps"),
    ],
)
def test_an_end_is_what_the_table_says(noted, exit_code, why_stopped, printed, reason):
    assert end.end_of(noted, exit_code, why_stopped, [printed, "frame #0"]).reason == reason


# "R1 R3 >9" is a rank that calls the collective R in line 1 of t.py, then R in line 3, and waits in line 9.
@pytest.mark.parametrize(
    "of_ranks, pitfall, named",
    [
        pytest.param(["R1 R3 >3", "R1 >9"], "collective_on_rank_0", {"3": "rank 0"}, id="nobody"),
        pytest.param(["B2", "R1 B2"], "collective_on_rank_0", {"1": "rank 1"}, id="next"),
        pytest.param(["B1 B2 >2", "B2 R3 >3"], "collective_on_rank_0", {"1": "rank 0"}, id="where a rank waits"),
        pytest.param(["B1 B3 >3", "B2 >9"], None, {"1": "rank 0", "3": "rank 0", "2": "rank 1"}, id="1 or 3"),
        pytest.param(["R1 R1", "R1"], None, {}, id="the same once more"),
        pytest.param(["B1 R3", "B2 R3", "B2 R3"], None, {"1": "rank 0", "2": "rank 1, rank 2"}, id="if"),
    ],
)
def test_a_collective_that_not_all_ranks_have_called_is_named(of_ranks, pitfall, named):
    records = [Record(rank, end=STOPPED) for rank in range(len(of_ranks))]
    for one, calls in zip(records, of_ranks, strict=True):
        of_rank = [Call(name, f"t.py:{line}") for name, line in calls.split()]
        one.waits_in = "".join(call.line for call in of_rank if call.name == ">")
        one.collectives = dict.fromkeys(call for call in of_rank if call.name != ">")
    result = end.check_end(records)
    assert result.pitfall == pitfall
    assert dict(re.findall(r"t\.py:(\d) was called by (.*?) alone", result.text)) == named


@pytest.mark.parametrize("caller, complete", [(None, True), (1, False), (0, True), (0, False)])
def test_a_rank_that_evaluates_alone_is_named_unless_another_collective_is_the_cause(caller, complete):
    records = [Record(0, end=STOPPED, epochs=[epoch_of(range(4), trained=False)]), Record(1, end=STOPPED)]
    records[0].epochs[0].complete = complete
    if caller is not None:  # it waits at a barrier, and handles no error of its own
        records[caller].handles = LOST.text
        records[caller].waits_in = "t.py:9"
        records[caller].collectives[Call("barrier", "t.py:9")] = None
    found = "was called by rank 0 alone" if caller == 0 else "the ranks have begun 1, 0 evaluations"
    assert end.check_end(records).text.endswith(found)


def test_without_a_process_group_only_a_bad_end_is_examined():
    alone = Record(0, end=End("finished"), last_printed="no training")
    assert program.why_nothing_was_examined([alone, alone]).endswith("; it printed last: no training")
    for end_of_another in (STOPPED, End("crash", "ValueError")):
        records = [alone, Record(1, end=end_of_another)]
        assert program.why_nothing_was_examined(records) is None
        text = "\n".join(report.lines(checks.run_all(records), records))
        assert "Not examined: all the rest, because no optimizer step was seen before the end.\n" in text


def test_what_fails_leaves_the_answers_of_the_others_but_nothing_is_called_healthy(monkeypatch):
    monkeypatch.setattr(launch, "run_ranks", lambda *args: [Record(0, backend="gloo"), Record(1)])
    assert program.main([__file__]) == 2  # as no check is right
    monkeypatch.setitem(checks.CHECKS, "files", lambda records: records[44])
    monkeypatch.setitem(checks.CHECKS, "schedule", lambda records: Passed())
    assert program.main([__file__]) == 2
    results = checks.run_all([Record(0), Record(1)])
    assert results["files"].reason == "the check failed: IndexError: list index out of range"
    results.update(HEALTHY)
    assert "Healthy" not in "\n".join(report.lines(results, [Record(0)]))
    assert "Healthy" not in "\n".join(report.lines(HEALTHY, [Record(0, observer_errors={"f: ValueError": ""})]))
    assert "Healthy" in "\n".join(report.lines(HEALTHY, [Record(rank=0)]))
