"""What three ways of evaluating on three ranks count and cost."""

from benchmarks import evaluation


def test_evaluation(in_turns, keep, quick, data_flags):
    counted = evaluation.facts(data_flags)
    samples = in_turns(evaluation.contestants(data_flags), 2 if quick else 7)
    keep(evaluation.record(samples, counted))
    assert [counted[way]["counted"] for way in counted] == [10002, 10000, 10000]
    assert counted[evaluation.EXACT]["correct"] == counted[evaluation.GATHERED]["correct"]
    assert counted[evaluation.PADDED]["collectives"] == counted[evaluation.EXACT]["collectives"] == 1
