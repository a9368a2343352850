"""The prediction for a network of somebody else's: its counts, and what follows from them."""

import pytest
from torchvision import models

from benchmarks.your_network import __main__ as program
from benchmarks.your_network.count import count
from benchmarks.your_network.spec import load
from tests.unit.benchmarks.example_networks import SENTENCES_SPEC, decoder


def test_the_counts_of_two_inputs_and_attention_are_those_counted_by_hand(sentences):
    network = count(sentences, 64)
    layer = (96 * 32 + 96) + (32 * 32 + 32) + (64 * 32 + 64) + (32 * 64 + 32) + 2 * 64
    assert network.parameters == 500 * 32 + 32 + 2 * layer + (32 * 3 + 3)
    tokens = 24
    linear = tokens * 32 * (96 + 32 + 64 + 64)
    attention = 2 * tokens * tokens * 32
    assert network.multiply_adds == 2 * (linear + attention) + 32 * 3


def test_the_operators_of_a_step_are_those_that_start_a_kernel(write_network):
    spec = write_network(
        "def build(): return nn.Linear(8, 3)\n"
        "def batch(n): return torch.zeros(n, 5, 8), torch.zeros(n, 5, dtype=torch.long)\n"
        "def loss(scores, classes):\n"
        "    assert torch.equal(classes, classes)\n"
        "    return F.cross_entropy(scores.flatten(0, 1), classes.flatten())\n"
    )
    network = count(load(spec), 64)
    # Forward: addmm, equal, log_softmax, nll_loss. Backward: the gradient of 1, of nll_loss, of log_softmax, of the
    # weight, and of the bias. AdamW: its 9 operators for all parameters. It also reads the step of each parameter.
    assert network.operators == 4 + 5 + 9


@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_attention_is_one_operator_in_forward_and_one_in_backward(dropout, write_network):
    spec = write_network(decoder(50, f"scaled_dot_product_attention(*heads, None, {dropout}, is_causal=True)"))
    network = count(load(spec), 64)
    # Forward: two products, attention, log_softmax, nll_loss. Backward: the gradient of 1, of nll_loss, of log_softmax,
    # of two weights and one input, of attention, and queries, keys and values in one tensor, which is copied for the
    # product. AdamW: 9.
    assert network.operators == 5 + 9 + 9
    assert network.multiply_adds == 50 * 32 * (96 + 3) + 2 * 50 * 50 * 32


def test_a_shared_parameter_counts_once_and_a_frozen_one_not_at_all(write_network):
    spec = write_network(
        "def build():\n"
        "    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))\n"
        "    model[1].weight = model[0].weight\n"
        "    model[2].requires_grad_(False)\n"
        "    return model\n",
    )
    network = count(load(spec, (8,)), 64)
    assert network.parameters == 8 * 8 + 8 + 8
    assert network.multiply_adds == 3 * 8 * 8
    # Backward: the gradients of two inputs, and of the weight at both of its places.
    assert network.gradients[-1].done == 4 * 8 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "vgg16", "convnext_tiny", "swin_t"])
def test_parameters_and_multiply_adds_are_those_that_torchvision_publishes(name):
    """Attention computes with parameters of a child that it does not call, and multiplies what is no parameter."""
    published = models.get_model_weights(name).IMAGENET1K_V1.meta
    network = count(load(f"torchvision:{name}"), 2)
    assert network.parameters == published["num_params"]
    assert network.multiply_adds / 1e9 == pytest.approx(published["_ops"], abs=0.001)


@pytest.mark.parametrize("milliseconds", [250, 0.1])
def test_a_step_that_was_measured_is_the_step_on_one_gpu(milliseconds):
    """It may be shorter than its launches are assumed to be."""
    one, two, *_ = program.main(["predict", SENTENCES_SPEC, "--measured-ms", str(milliseconds)])
    assert one.seconds == pytest.approx(milliseconds / 1000)
    assert two.seconds > one.seconds


def test_a_score_for_each_pair_of_samples_is_counted_in_the_batch_that_was_asked_for(write_network):
    spec = write_network(
        "def build(): return nn.Sequential(nn.Embedding(50_000, 64), nn.Flatten(), nn.Linear(64, 64))\n"
        "def batch(n): return torch.randint(50_000, (n, 1)), torch.arange(n)\n"
        "def loss(rows, targets): return F.cross_entropy(rows @ rows.T, targets)\n"
    )
    few = count(load(spec), 2)
    many = count(load(spec), 1024)
    assert few.multiply_adds == 64 * 64 + 2 * 64
    assert many.multiply_adds == 64 * 64 + 1024 * 64
    assert many.bytes_of_a_sample > few.bytes_of_a_sample + 1024 * 4


def test_the_answer_has_every_number_of_gpus(capsys):
    rows = program.main(["predict", SENTENCES_SPEC, "--gpu", "h200", "--batch-per-gpu", "48"])
    printed = capsys.readouterr().out
    assert [row.gpus for row in rows] == [2**exponent for exponent in range(10)]
    first, second, *_ = printed.splitlines()
    assert first == "A PREDICTION: losses may be half or twice as large (benchmarks/PREDICTION.md)."
    assert second.startswith("sentences:build, 48 samples on each H200,")
    assert max(map(len, printed.splitlines())) <= 80


TABLE = """
def build(): return nn.Embedding(4, 3)
def batch(n): return torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
"""
# cuDNN fuses the operators of several time steps, into how many kernels is not published.
RECURRENT = """
def build(): return nn.LSTM(6, 3, batch_first=True)
def batch(n): return torch.zeros(n, 7, 6), torch.zeros(n, 7, 3)
def loss(outputs, targets): return F.mse_loss(outputs[0], targets)
"""
UNUSED = """
def build():
    network = nn.Linear(4, 3)
    network.unused = nn.Linear(4, 3)
    return network
def batch(n): return torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)
"""


@pytest.mark.parametrize(
    "network, flags, message",
    [
        (TABLE, [], "multiplies nothing"),
        (UNUSED, [], "2 parameters of mine:build get no gradient"),
        (RECURRENT, [], "has recurrent layers"),
        (TABLE, ["--measured-ms", "0"], "must be a number above 0"),
        (TABLE, ["--batch-per-gpu", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(network, flags, message, write_network, capsys):
    with pytest.raises(SystemExit) as end:
        program.main(["predict", write_network(network), *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
