"""The model of a data-parallel step: what must hold for any links, and how it does against published measurements."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from benchmarks.your_network import presets
from benchmarks.your_network.all_reduce import START_SECONDS, Cluster, Link, seconds_of_all_reduce
from benchmarks.your_network.count import Gradient
from benchmarks.your_network.predict import make_setup, times_resnet50
from benchmarks.your_network.scaling import (
    LARGEST_GLOBAL_BATCH,
    PAYING_EFFICIENCY,
    Bucket,
    Setup,
    expected_maximum,
    fill_buckets,
    pays_from,
    predicted_seconds,
    scaling_efficiency,
    transfers,
)
from common import ladder
from tests.unit.benchmarks import published
from tests.unit.benchmarks.published import costs_of

GPUS = st.sampled_from([2, 4, 8, 16, 64, 256, 512])
BATCHES = st.integers(1, 512)
LINKS = st.builds(Link, latency=st.floats(0, 1e-3), bandwidth=st.floats(1e6, 1e12))
SPANS = st.lists(st.tuples(st.integers(1, 10**8), st.integers(1, 10**9)), min_size=1, max_size=12)


@st.composite
def gradients(draw) -> tuple[Gradient, ...]:
    spans = draw(SPANS)
    ends = itertools.accumulate(span for _, span in spans)
    return tuple(Gradient(parameters, end) for (parameters, _), end in zip(spans, ends, strict=True))


SETUPS = st.builds(
    Setup,
    buckets=gradients().map(fill_buckets),
    sample_seconds=st.floats(1e-6, 1e-2),
    launch_seconds=st.floats(0, 0.2),
    cluster=st.builds(Cluster, gpus_per_node=st.sampled_from([1, 2, 4, 8]), inner=LINKS, between=LINKS),
    backward_share=st.floats(0.1, 0.9),
    speed_spread=st.floats(0, 0.1),
    contention=st.floats(0, 0.5),
)


def on_a100(network: str) -> Setup:
    """A network on the hardware of the page's table, which `predict` takes unless it is told otherwise."""
    return make_setup(costs_of(network), "a100", "nvlink", 8, "8x200g")


def without_effects(setup: Setup) -> Setup:
    return replace(setup, speed_spread=0.0, contention=0.0)


@pytest.mark.parametrize(
    "gpus, latency, bandwidth",
    [
        (8, 2 * 3 * 5e-6, 1e10),  # one node, 2 log2 8 messages
        (64, 2 * 3 * (5e-6 + 2e-5), 5e9),  # eight nodes, whose network is the narrowest
    ],
)
def test_an_all_reduce_costs_what_the_formula_says(gpus, latency, bandwidth):
    cluster = Cluster(8, inner=Link(5e-6, 1e10), between=Link(2e-5, 5e9))
    sent = 2 * (gpus - 1) / gpus * 4e7
    assert seconds_of_all_reduce(cluster, 40_000_000, gpus) == pytest.approx(START_SECONDS + latency + sent / bandwidth)


@settings(max_examples=60)
@given(SETUPS, BATCHES, GPUS)
def test_a_step_takes_its_compute_at_least_and_everything_in_a_row_at_most(setup, batch, gpus):
    even = without_effects(setup)
    compute = predicted_seconds(even, batch, 1)
    moving = sum(seconds_of_all_reduce(even.cluster, bucket.size, gpus) for bucket in even.buckets)
    assert compute * (1 - 1e-9) <= predicted_seconds(even, batch, gpus) <= (compute + moving) * (1 + 1e-9)


@settings(max_examples=60)
@given(gradients(), SETUPS, GPUS)
def test_all_gradients_are_sent_once_and_one_bucket_after_another(gradients, setup, gpus):
    buckets = fill_buckets(gradients)
    assert sum(bucket.size for bucket in buckets) == 4 * sum(gradient.parameters for gradient in gradients)
    assert buckets[-1].ready == 1
    sent = transfers(replace(setup, buckets=buckets), 0.5, gpus)
    for bucket, transfer in zip(buckets, sent, strict=True):
        assert transfer.start >= 0.5 * bucket.ready
    for before, after in itertools.pairwise(sent):
        assert after.start >= before.end


def test_a_bucket_is_sent_when_it_is_full():
    """8 MB each: the first one fills DDP's first bucket of 1 MiB, four fill one of 25 MiB, and three are left."""
    gradients = tuple(Gradient(2_000_000, done) for done in range(1, 9))
    sizes = [Bucket(8_000_000, 1 / 8), Bucket(32_000_000, 5 / 8), Bucket(24_000_000, 1.0)]
    assert fill_buckets(gradients) == tuple(sizes)
    assert fill_buckets((Gradient(10, 0),)) == (Bucket(40, 1.0),)  # only the last bias is trained


def test_the_example_of_a_step_takes_as_long_as_its_docstring_says():
    buckets = (Bucket(10_000_000, 0.5), Bucket(10_000_000, 1.0))
    wire = Link(latency=0, bandwidth=1e9)
    setup = Setup(buckets, 1e-3, 0, Cluster(8, wire, wire), speed_spread=0, contention=0.2)
    assert transfers(setup, 22e-3, 2)[-1].end == pytest.approx(32e-3, rel=1e-3)
    assert predicted_seconds(setup, 30, 1) == pytest.approx(30e-3)
    assert predicted_seconds(setup, 30, 2) == pytest.approx(42e-3, rel=1e-3)


def test_a_small_step_is_bound_by_launches_which_hide_what_makes_kernels_slower():
    setup = on_a100("BasicNet")
    even = without_effects(setup)
    slower = replace(setup, speed_spread=0.05, contention=0.4)
    assert predicted_seconds(setup, 1, 1) == predicted_seconds(setup, 64, 1) == pytest.approx(42 * 10e-6)
    assert predicted_seconds(setup, 100_000, 1) == pytest.approx(100_000 * setup.sample_seconds)
    assert predicted_seconds(slower, 1, 8) == predicted_seconds(even, 1, 8)
    assert predicted_seconds(slower, 100_000, 8) > predicted_seconds(even, 100_000, 8)


@settings(max_examples=60)
@given(SETUPS, GPUS)
def test_gpus_pay_from_the_smallest_batch_that_is_enough(setup, gpus):
    found = pays_from(setup, gpus)
    if found is None:
        assert scaling_efficiency(setup, LARGEST_GLOBAL_BATCH, gpus) <= PAYING_EFFICIENCY
        return
    assert scaling_efficiency(setup, found, gpus) > PAYING_EFFICIENCY
    assert found == gpus or scaling_efficiency(setup, found // 2, gpus) <= PAYING_EFFICIENCY


def test_the_efficiency_compares_with_one_gpu_that_has_the_same_global_batch():
    """A step of BasicNet is launch-bound: one GPU takes 64 samples in the time of 32."""
    assert scaling_efficiency(on_a100("BasicNet"), 64, 2) <= 0.5


@pytest.mark.parametrize("count, exact", [(1, 0.0), (2, 0.5642), (8, 1.4236), (100, 2.5076), (1000, 3.2414)])
def test_the_largest_of_normal_samples(count, exact):
    """Exact values: Harter, Expected values of normal order statistics, Biometrika 1961."""
    assert expected_maximum(count) == pytest.approx(exact, abs=0.03)


@pytest.mark.slow
@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 15), reason="other releases call other operators")
def test_resnet50_is_as_it_was_counted():
    network = costs_of("ResNet-50")
    assert network.multiply_adds == presets.RESNET50_MULTIPLY_ADDS
    assert network.bytes_of_a_sample == presets.RESNET50_BYTES_OF_A_SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, per_second, factor", [("Inception V3", 134.4, 1.17), ("ResNet-101", 119.4, 0.96), ("VGG-16", 130.9, 0.44)]
)
def test_other_networks_compute_as_much_longer_than_predicted_as_is_said(name, per_second, factor):
    """Sources, for one P100: Horovod, README.md of October 2017; for ResNet-50, TensorFlow's guide "Benchmarks"."""
    published_times_resnet50 = 219 / per_second
    assert published_times_resnet50 / times_resnet50(costs_of(name)) == pytest.approx(factor, abs=0.005)


def test_a_rate_that_is_derived_is_near_what_others_measured():
    """MLPerf Training 3.0, results of Dell: ResNet-50 on 16 A100 in 14.4 minutes, on 16 H100 in 7.8."""
    measured = 14.4 / 7.8 * presets.GPUS["a100-amp"].resnet50_per_second
    assert presets.GPUS["h100-amp"].resnet50_per_second == pytest.approx(measured, rel=0.12)


@pytest.mark.slow
def test_predicted_losses_are_within_a_factor_of_two_of_published_ones():
    """This holds where all inputs are published. Nothing is fitted: every case has the same averages of others."""
    for case in published.cases():
        if case.inputs_are_published:
            assert case.off_by <= 2, case.name


def pays_markdown() -> str:
    lines = ["| network | 2 GPUs | 8 GPUs | 64 GPUs | 512 GPUs |", "|---|--:|--:|--:|--:|"]
    for name in ("BasicNet", "ResNet-50", "VGG-16"):
        setup = on_a100(name)
        batches = [f"{pays_from(setup, gpus):,}" for gpus in (2, 8, 64, 512)]
        lines.append(f"| {name} | {' | '.join(batches)} |")
    return "\n".join(lines)


@pytest.mark.slow
def test_the_page_shows_the_tables():
    page = (ladder.ROOT / "benchmarks" / "PREDICTION.md").read_text()
    assert pays_markdown() in page
    assert published.markdown() in page
