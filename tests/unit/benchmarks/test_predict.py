"""The model of a data-parallel step: what must hold for any links, and how it does against published measurements."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.torch_version import TorchVersion
from torchvision import models

from benchmarks.predict import __main__ as command
from benchmarks.predict import presets
from benchmarks.predict.all_reduce import (
    ALGORITHMS,
    COSTS,
    FASTEST,
    RING,
    RING_AND_TREE,
    TREE,
    TWO_RINGS,
    Cluster,
    Link,
    all_reduce,
    bus_bandwidth,
)
from benchmarks.predict.assumptions import assuming, of_compute
from benchmarks.predict.count import count, count_all, count_layers, count_network
from benchmarks.predict.networks import networks
from benchmarks.predict.published import WITHIN, cases, lost, off_by, predict
from benchmarks.predict.step import (
    DDP,
    HOROVOD,
    Layer,
    Network,
    Workload,
    expected_maximum,
    pays_from,
    speed_up,
    step,
    transfers,
    weak_efficiency,
    without_effects,
)
from benchmarks.predict.table import pay_markdown, pay_table, published_markdown, published_table
from common import ladder

# A machine that others use too may be slow, and a run is to be repeatable.
SEEDED = settings(deadline=None, derandomize=True, max_examples=60)
SECONDS = st.floats(0, 1e-3)
BANDWIDTHS = st.floats(1e6, 1e12)
SIZES = st.floats(1, 1e10)
GPUS = st.sampled_from([2, 4, 8, 16, 64, 256, 512])
LINKS = st.builds(Link, SECONDS, BANDWIDTHS)
CLUSTERS = st.builds(Cluster, st.sampled_from([1, 2, 4, 8]), LINKS, LINKS, st.sampled_from(ALGORITHMS), SECONDS)
LAYERS = st.lists(st.builds(Layer, st.integers(1, 10**8), st.integers(1, 10**9)), min_size=1, max_size=12)
NETWORKS = st.builds(Network, st.just("any"), LAYERS.map(tuple), st.integers(0, 2000))
TRAININGS = st.builds(
    Workload,
    NETWORKS,
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-4),
    st.floats(0.1, 0.9),
    st.sampled_from([DDP, HOROVOD]),
    st.floats(0, 0.1),
    st.floats(0, 0.5),
)


def flat(link: Link, algorithm: str = RING, gpus_per_node: int = 1024) -> Cluster:
    """All GPUs in one node."""
    return Cluster(gpus_per_node, link, Link(1.0, 1.0), algorithm)


def test_a_ring_costs_what_the_formula_says():
    cluster = flat(Link(latency=5e-6, bandwidth=1e10))
    assert all_reduce(4e7, 8, cluster) == pytest.approx(2 * 7 * 5e-6 + 2 * 7 / 8 * 4e7 / 1e10)
    tree = replace(cluster, algorithm=TREE)
    assert all_reduce(4e7, 8, tree) == pytest.approx(2 * 3 * 5e-6 + 2 * 7 / 8 * 4e7 / 1e10)


@pytest.mark.parametrize("algorithm", [RING, TREE, TWO_RINGS, RING_AND_TREE, FASTEST])
@pytest.mark.parametrize("gpus", [2, 3, 8, 100])
def test_the_bus_bandwidth_of_nccl_tests_is_the_links(algorithm, gpus):
    cluster = flat(Link(latency=0.0, bandwidth=2.35e11), algorithm)
    seconds = all_reduce(1e8, gpus, cluster)
    assert bus_bandwidth(1e8, seconds, gpus) == pytest.approx(2.35e11)


@SEEDED
@given(SIZES, CLUSTERS, TRAININGS, st.integers(1, 1000))
def test_one_gpu_communicates_nothing(size, cluster, training, batch):
    assert all_reduce(size, 1, cluster) == 0
    assert step(training, batch, 1, cluster) == training.compute(batch)
    assert speed_up(training, batch, 1, cluster) == 1


@SEEDED
@given(SIZES, GPUS, CLUSTERS, st.floats(1, 1000))
def test_an_all_reduce_gets_no_slower_with_faster_links(size, gpus, cluster, factor):
    before = all_reduce(size, gpus, cluster)
    for name in ("inner", "network"):
        link = getattr(cluster, name)
        wider = replace(cluster, **{name: replace(link, bandwidth=link.bandwidth * factor)})
        quicker = replace(cluster, **{name: replace(link, latency=link.latency / factor)})
        assert all_reduce(size, gpus, wider) <= before * (1 + 1e-9)
        assert all_reduce(size, gpus, quicker) <= before * (1 + 1e-9)
    assert before <= all_reduce(size * factor, gpus, cluster) * (1 + 1e-9)


@SEEDED
@given(SIZES, CLUSTERS, st.sampled_from([(2, 8), (8, 64), (64, 512)]))
def test_an_all_reduce_over_more_gpus_takes_no_less(size, cluster, counts):
    few, many = counts
    even = replace(cluster, network=cluster.inner)
    assert all_reduce(size, few, even) <= all_reduce(size, many, even) * (1 + 1e-9)


@SEEDED
@given(SIZES, GPUS, CLUSTERS)
def test_the_fastest_is_as_fast_as_the_best_of_the_others(size, gpus, cluster):
    times = {name: all_reduce(size, gpus, replace(cluster, algorithm=name)) for name in ALGORITHMS}
    assert times[FASTEST] == min(times[name] for name in COSTS)


@SEEDED
@given(SIZES, st.sampled_from([2, 8, 64, 512]), LINKS, LINKS)
def test_two_tiers_are_one_where_there_is_one_node_or_one_gpu_a_node(size, gpus, inner, network):
    for gpus_per_node in (1, 512):
        times = []
        for algorithm in (RING, TWO_RINGS):
            times.append(all_reduce(size, gpus, Cluster(gpus_per_node, inner, network, algorithm)))
        assert times[0] == pytest.approx(times[1])
        tree = all_reduce(size, gpus, Cluster(1, inner, network, TREE))
        assert all_reduce(size, gpus, Cluster(1, inner, network, RING_AND_TREE)) == pytest.approx(tree)


@SEEDED
@given(SIZES, st.sampled_from([16, 64, 512]), BANDWIDTHS)
def test_two_tiers_with_equal_links_move_what_a_flat_ring_moves(size, gpus, bandwidth):
    """Each of a node's 8 GPUs has as wide a way to the other nodes as to its neighbours: the bytes cost the same."""
    inner = Link(0.0, bandwidth)
    shared = Link(0.0, 8 * bandwidth)
    tiers = all_reduce(size, gpus, Cluster(8, inner, shared, TWO_RINGS))
    assert tiers == pytest.approx(all_reduce(size, gpus, flat(inner)))


def test_gpus_fill_nodes_and_algorithms_have_names():
    cluster = Cluster(8, Link(0.0, 1.0), Link(0.0, 1.0))
    with pytest.raises(ValueError, match="12 GPUs do not fill nodes of 8"):
        all_reduce(1.0, 12, cluster)
    with pytest.raises(ValueError, match="no algorithm 'torus'"):
        all_reduce(1.0, 8, replace(cluster, algorithm="torus"))


@SEEDED
@given(TRAININGS, CLUSTERS, GPUS, st.integers(1, 512))
def test_a_step_takes_at_least_its_compute_and_at_most_everything_in_a_row(training, cluster, gpus, batch):
    training = without_effects(training)
    compute = training.compute(batch)
    backward = compute * training.backward_share
    moving = sum(end - start for start, end in transfers(training, backward, gpus, cluster))
    seconds = step(training, batch, gpus, cluster)
    assert compute * (1 - 1e-9) <= seconds <= (compute + moving) * (1 + 1e-9)
    assert weak_efficiency(training, batch, gpus, cluster) <= 1 + 1e-9


@SEEDED
@given(TRAININGS, CLUSTERS, GPUS, st.integers(1, 512), st.floats(1, 100))
def test_a_step_with_full_buckets_gets_no_slower_with_a_wider_network(training, cluster, gpus, batch, factor):
    training = replace(training, buckets=DDP)
    wider = replace(cluster, network=replace(cluster.network, bandwidth=cluster.network.bandwidth * factor))
    assert step(training, batch, gpus, wider) <= step(training, batch, gpus, cluster) * (1 + 1e-9)


@SEEDED
@given(NETWORKS, st.sampled_from([DDP, HOROVOD]), GPUS)
def test_all_gradients_are_sent_once_and_one_after_another(network, buckets, gpus):
    training = Workload(network, 1e-3, 0.0, buckets=buckets)
    cluster = flat(Link(0.0, 1.0))
    sent = list(transfers(training, 0.5, gpus, cluster))
    moved = sum(end - start for start, end in sent)
    assert moved == pytest.approx(2 * (gpus - 1) / gpus * 4 * network.parameters)
    for before, after in itertools.pairwise(sent):
        assert after.start >= before.end


def test_buckets_follow_their_rule():
    """Three layers of 40 MB: DDP's bucket of 25 MiB is full with each; Horovod's of 64 MB waits for the network."""
    layers = tuple(Layer(10_000_000, 1) for _ in range(3))
    network = Network("three", layers, operators=0)
    free = flat(Link(0.0, 1e30))
    busy = flat(Link(0.0, 1e6))
    for cluster in (free, busy):
        assert len(list(transfers(Workload(network, 1.0, 0.0), 1.0, 2, cluster))) == 3
    fused = replace(HOROVOD, size=1e9)
    training = Workload(network, 1.0, 0.0, buckets=fused)
    assert len(list(transfers(training, 1.0, 2, free))) == 3
    assert len(list(transfers(training, 1.0, 2, busy))) == 2


def test_a_small_step_is_bound_by_launches_which_hide_what_makes_kernels_slower():
    basic_net = presets.training(networks()["BasicNet"], presets.GPUS["a100"])
    assert basic_net.kernels(1) < 0.1 * basic_net.launches
    assert basic_net.compute(1) == basic_net.compute(64) == pytest.approx(42 * 10e-6)
    assert basic_net.compute(100_000) == pytest.approx(100_000 * basic_net.sample_seconds)
    cluster = presets.cluster("nvlink-a100", "8x200g", 8)
    assert speed_up(basic_net, 64, 8, cluster) < 1 < speed_up(basic_net, 4096, 8, cluster)
    slowed = replace(basic_net, speed_spread=0.05, contention=0.4)
    even = without_effects(basic_net)
    assert step(slowed, 1, 8, cluster) == step(even, 1, 8, cluster)
    assert step(slowed, 100_000, 8, cluster) > step(even, 100_000, 8, cluster)


@SEEDED
@given(TRAININGS, CLUSTERS, GPUS, st.integers(1, 512))
def test_slow_gpus_and_contention_cost_no_more_than_they_lengthen_the_kernels(training, cluster, gpus, batch):
    slowed = replace(training, buckets=DDP)
    even = step(without_effects(slowed), batch, gpus, cluster)
    factor = (1 + slowed.speed_spread * expected_maximum(gpus)) * (1 + slowed.contention)
    longest = max(slowed.kernels(batch) * factor, slowed.launches)
    seconds = step(slowed, batch, gpus, cluster)
    assert even <= seconds * (1 + 1e-9)
    assert seconds <= even + longest - slowed.compute(batch) + 1e-9


@SEEDED
@given(TRAININGS, CLUSTERS, GPUS, st.integers(1, 100))
def test_strong_and_weak_scaling_are_of_one_step(training, cluster, gpus, batch):
    same_work = training.compute(batch * gpus) / training.compute(batch)
    weak = weak_efficiency(training, batch, gpus, cluster)
    assert speed_up(training, batch * gpus, gpus, cluster) == pytest.approx(same_work * weak)


@SEEDED
@given(TRAININGS, CLUSTERS, GPUS, st.floats(0.1, 0.95))
def test_gpus_pay_from_the_smallest_batch_that_is_enough(training, cluster, gpus, efficiency):
    found = pays_from(training, gpus, cluster, efficiency, most=2**20)
    if found is None:
        assert speed_up(training, 2**20, gpus, cluster) <= efficiency * gpus
        return
    assert speed_up(training, found, gpus, cluster) > efficiency * gpus
    assert found == gpus or speed_up(training, found // 2, gpus, cluster) <= efficiency * gpus


@pytest.mark.parametrize("count, exact", [(1, 0.0), (2, 0.5642), (8, 1.4236), (100, 2.5076), (1000, 3.2414)])
def test_the_largest_of_normal_samples(count, exact):
    """Exact values: Harter, Expected values of normal order statistics, Biometrika 1961."""
    assert expected_maximum(count) == pytest.approx(exact, abs=0.03)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 15),
    reason="the networks were counted with torch 2.15; others call other operators",
)
@pytest.mark.parametrize("name", ["BasicNet", "VGG-16"])
def test_networks_are_as_they_were_counted(name):
    assert count(name) == networks()[name]


@pytest.mark.long
def test_all_networks_are_as_they_were_counted():
    assert count_all() == networks()


def test_the_networks_have_the_sizes_that_are_published():
    sizes = {name: network.parameters for name, network in networks().items()}
    assert sizes["BasicNet"] == 1_199_882
    assert sizes["BERT-large"] == pytest.approx(335e6, rel=0.01)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "vit_b_16", "convnext_tiny", "swin_t"])
def test_parameters_and_multiply_adds_are_those_that_torchvision_publishes(name):
    """Attention computes with parameters of a child that it does not call, and multiplies what is no parameter."""
    published = models.get_model_weights(name).IMAGENET1K_V1.meta
    with torch.device("meta"):
        module = models.get_model(name)
        images = torch.zeros(2, 3, 224, 224)
        layers = count_layers(module, lambda: module(images), samples=2)
    assert sum(layer.parameters for layer in layers) == published["num_params"]
    assert sum(layer.multiply_adds for layer in layers) / 1e9 == pytest.approx(published["_ops"], abs=0.001)


@pytest.mark.parametrize(
    "name, build, gpu, images_per_second",
    [
        ("Inception V3", None, "p100", 134.4),
        ("ResNet-101", None, "p100", 119.4),
        ("VGG-16", None, "p100", 130.9),
        pytest.param("EfficientNet-B0", models.efficientnet_b0, "a100", 1078, marks=pytest.mark.slow),
    ],
)
def test_the_published_rates_of_other_networks_are_within_the_range(name, build, gpu, images_per_second):
    """Sources: Horovod, README.md of October 2017; NVIDIA, DeepLearningExamples, PyTorch EfficientNet."""
    network = networks()[name] if build is None else counted(name, build)
    published = 1 / images_per_second
    estimate = presets.sample_seconds(network, presets.GPUS[gpu])
    assumption = of_compute(network, presets.GPUS[gpu])
    assert estimate * assumption.kind <= published <= estimate * assumption.harsh


def counted(name: str, build) -> Network:
    """A network for images, which is not among those that are kept."""
    with torch.device("meta"):
        module = build()
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
        return count_network(
            name,
            module,
            optimizer,
            batch=lambda count: torch.zeros(count, 3, 224, 224),
            loss=lambda inputs: module(inputs).mean(),
        )


def test_a_rate_that_is_derived_has_a_range_with_what_others_measured():
    """MLPerf Training 3.0, results of Dell: ResNet-50 on 16 A100 in 14.4 minutes, on 16 H100 in 7.8."""
    h100 = presets.GPUS["h100-amp"]
    measured = 14.4 / 7.8 * presets.GPUS["a100-amp"].resnet50_per_second
    assert h100.resnet50_per_second <= measured <= h100.resnet50_per_second * h100.fastest
    rates = [presets.GPUS[key].resnet50_per_second for key in ("a100", "h100", "h200", "b200")]
    assert rates == sorted(rates)


PUBLISHED = {case.name: case for case in cases()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_predicted_losses_are_within_a_factor_of_two_of_published_ones(name):
    """This holds where all inputs are published; the others say in their remark what is not."""
    case = PUBLISHED[name]
    prediction = predict(case)
    assert prediction.kind <= prediction.lost <= prediction.harsh
    assert 0 <= prediction.network_alone <= prediction.lost
    if case.inputs_are_published:
        assert off_by(case) <= WITHIN
    else:
        assert "Not published" in case.remark


def test_the_cases_that_were_promised_are_there():
    known = " ".join(name for name, case in PUBLISHED.items() if case.inputs_are_published)
    for name in ("Inception V3, 512", "ResNet-101, 512", "VGG-16, 512", "Goyal"):
        assert name in known
    assert any("Li et al." in name for name in PUBLISHED)


def test_the_effects_have_their_published_sizes():
    """Nothing is fitted: every case has the same averages, which are others' measurements."""
    for case in PUBLISHED.values():
        assert case.setup.training.contention == 0.189
        assert case.setup.training.speed_spread == pytest.approx(0.08 / 5.4)


def test_an_assumption_must_exist():
    case = PUBLISHED["Horovod, VGG-16, 512 GPUs"]
    narrower = replace(case, setup=assuming(case.setup, "bandwidth", 0.5))
    assert lost(narrower) > lost(case)
    with pytest.raises(ValueError, match="no assumption 'weather'"):
        assuming(case.setup, "weather", 1.0)


def test_the_table_says_that_it_is_a_prediction(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["predict", "--gpu", "v100", "--inner", "pcie3", "--network", "100g"])
    command.main()
    shown = capsys.readouterr().out
    assert shown.startswith("A PREDICTION, not a measurement: V100")
    for network in networks():
        assert shown.count(f"\n{network} ") == 2  # its times, and its batches
    for name in PUBLISHED:
        assert f"\n{name}" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_the_tables_rows_are_of_the_cluster_that_is_asked_for():
    gpu = presets.GPUS["a100"]
    wide = pay_table(gpu, presets.cluster("nvlink-a100", "8x400g", 8))
    narrow = pay_table(gpu, presets.cluster("pcie3", "25g", 8))
    assert wide != narrow
    assert "!" in published_table()


def test_the_pages_show_the_tables():
    folder = ladder.ROOT / "benchmarks"
    table = pay_markdown(presets.GPUS["a100"], presets.cluster("nvlink-a100", "8x200g", 8))
    assert table in (folder / "README.md").read_text()
    assert published_markdown() in (folder / "PREDICTION.md").read_text()
