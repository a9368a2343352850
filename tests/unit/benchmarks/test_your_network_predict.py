"""The prediction for a network of somebody else's: its counts, and what follows from them."""

import json
from dataclasses import replace

import pytest
from torchvision import models

from benchmarks.predict import answer, presets
from benchmarks.predict.answer import prediction, rows
from benchmarks.predict.count import Counted, count
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Hardware
from benchmarks.predict.step import speed_up, step
from benchmarks.your_network import __main__ as program
from benchmarks.your_network import spec

A100 = presets.GPUS["a100"]


def counted_of(network):
    return count(network, batch=64).network


def counted(name: str) -> Counted:
    return Counted(networks()[name], 2, recurrent=False)


def test_the_counts_of_two_inputs_and_attention_are_those_counted_by_hand(texts):
    network = counted_of(texts)
    layer = (96 * 32 + 96) + (32 * 32 + 32) + (64 * 32 + 64) + (32 * 64 + 32) + 2 * 64
    assert network.parameters == 500 * 32 + 32 + 2 * layer + (32 * 3 + 3)
    tokens = 24
    linear = tokens * 32 * (96 + 32 + 64 + 64)
    attention = 2 * tokens * tokens * 32
    assert network.multiply_adds == 2 * (linear + attention) + 32 * 3


def test_the_operators_of_a_step_are_those_that_start_a_kernel(tmp_path):
    path = tmp_path / "linear.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build(): return nn.Linear(8, 3)\n"
        "def batch(n): return torch.zeros(n, 5, 8), torch.zeros(n, 5, dtype=torch.long)\n"
        "def loss(scores, classes): return nn.functional.cross_entropy(scores.flatten(0, 1), classes.flatten())\n"
    )
    # Forward: addmm, log_softmax, nll_loss. Backward: the gradient of 1, of nll_loss, of log_softmax, of the weight,
    # and of the bias. AdamW: its 9 operators for all parameters. It also reads the step of each parameter.
    assert counted_of(spec.load(f"{path}:build")).operators == 3 + 5 + 9


DECODER = """
import torch
from torch import nn
from torch.nn import functional as F
class Attention(nn.Module):
    def forward(self, heads):
        return F.scaled_dot_product_attention(*heads, None, DROPOUT, is_causal=True)
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(32, 96, bias=False)
        self.attention = Attention()
        self.score = nn.Linear(32, 3, bias=False)
    def forward(self, x):
        heads = self.inputs(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.score(self.attention(heads).transpose(1, 2).flatten(2))
def build(): return Decoder()
def batch(n): return torch.randn(n, 50, 32), torch.zeros(n, 50, dtype=torch.long)
def loss(scores, classes): return F.cross_entropy(scores.flatten(0, 1), classes.flatten())
"""


@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_attention_is_one_operator_in_forward_and_one_in_backward(dropout, tmp_path):
    path = tmp_path / "decoder.py"
    path.write_text(DECODER.replace("DROPOUT", dropout))
    network = counted_of(spec.load(f"{path}:build"))
    # Forward: two products, attention, log_softmax, nll_loss. Backward: the gradient of 1, of nll_loss, of log_softmax,
    # of two weights and one input, of attention, and queries, keys and values in one tensor, which is copied for the
    # product. AdamW: 9.
    assert network.operators == 5 + 9 + 9
    assert network.multiply_adds == 50 * 32 * (96 + 3) + 2 * 50 * 50 * 32


def test_a_shared_parameter_counts_once_and_a_frozen_one_not_at_all(tmp_path):
    path = tmp_path / "tied.py"
    path.write_text(
        "from torch import nn\n"
        "def build():\n"
        "    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))\n"
        "    model[1].weight = model[0].weight\n"
        "    model[2].requires_grad_(False)\n"
        "    return model\n"
    )
    network = counted_of(spec.load(f"{path}:build", (8,)))
    assert network.parameters == 8 * 8 + 8 + 8
    assert network.multiply_adds == 3 * 8 * 8


@pytest.mark.parametrize(
    "name",
    [
        "resnet50",
        "vit_b_16",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("vgg16", "convnext_tiny", "swin_t")),
    ],
)
def test_parameters_and_multiply_adds_are_those_that_torchvision_publishes(name):
    """Attention computes with parameters of a child that it does not call, and multiplies what is no parameter."""
    published = models.get_model_weights(name).IMAGENET1K_V1.meta
    network = counted_of(spec.load(f"torchvision:{name}"))
    assert network.parameters == published["num_params"]
    assert network.multiply_adds / 1e9 == pytest.approx(published["_ops"], abs=0.001)


def test_the_rows_are_the_models():
    hardware = Hardware()
    setup, assumptions = prediction(counted("ResNet-50"), A100, hardware, batch=64)
    training = presets.training(networks()["ResNet-50"], A100)
    cluster = presets.cluster(hardware.inner, hardware.network, hardware.gpus_per_node)
    for row in rows(setup, assumptions):
        assert row.seconds == step(training, 64, row.gpus, cluster)
        assert row.kind <= row.seconds <= row.harsh
        assert row.worth == speed_up(training, 64 * row.gpus, row.gpus, cluster) / row.gpus
        assert (row.faster is None) == (row.gpus > 64)
        assert row.is_launch_bound is False
        assert row.shared_is_launch_bound == (training.kernels(64 / row.gpus) <= training.launches)


@pytest.mark.parametrize("milliseconds", [250.0, 0.1])
def test_a_step_that_was_measured_is_the_step_on_one_gpu(milliseconds):
    """Also where it is shorter than its launches are assumed to be."""
    gpu = answer.measured(networks()["ResNet-50"], 48, milliseconds)
    setup, assumptions = prediction(counted("ResNet-50"), gpu, Hardware(), 48, is_measured=True)
    alone, two, *_ = rows(setup, assumptions)
    assert alone.seconds == pytest.approx(milliseconds / 1000)
    assert alone.kind == alone.harsh == alone.seconds
    assert two.seconds > alone.seconds


PAIRS = """
import torch
from torch import nn
def build(): return nn.Sequential(nn.Embedding(50_000, 64), nn.Flatten(), nn.Linear(64, 64))
def batch(n): return torch.randint(50_000, (n, 1)), torch.arange(n)
def loss(rows, targets): return nn.functional.cross_entropy(rows @ rows.T, targets)
"""


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.py"
    path.write_text(PAIRS)
    return f"{path}:build"


def test_a_score_for_each_pair_of_samples_is_counted_in_the_batch_that_was_asked_for(pairs, texts):
    few = count(spec.load(pairs), 2)
    many = count(spec.load(pairs), 1024)
    assert few.network.multiply_adds == 64 * 64 + 2 * 64
    assert many.network.multiply_adds == 64 * 64 + 1024 * 64
    assert many.network.bytes_of_a_sample > few.network.bytes_of_a_sample + 1024 * 4
    assert many.grows and not count(texts, 64).grows


def test_the_update_moves_seven_numbers_a_parameter_of_adamw(pairs):
    network = spec.load(pairs)
    counts = counted_of(network)
    held = answer.holding(network, counts, Hardware(), 64)
    assert held.update_bytes == pytest.approx(7 * 4 * counts.parameters, rel=0.001)
    assert held.update_seconds == held.update_bytes / 2039e9


def test_a_batch_that_the_gpu_cannot_hold_is_said_not_to_fit(texts_file, capsys, monkeypatch):
    # A GPU of 16 GiB would need as much address space here, and then the system may refuse to fork this process.
    monkeypatch.setitem(presets.MEMORY, "p100", presets.Memory(2, 732))
    program.main(["predict", texts_file, "--gpu", "p100", "--batch", "16384"])
    assert "does not fit: it needs 2." in capsys.readouterr().out


def test_gpus_pay_only_where_fewer_with_more_samples_each_are_slower():
    """A step of BasicNet is launch-bound: one GPU takes 64 samples in the time of 32."""
    setup, assumptions = prediction(counted("BasicNet"), A100, Hardware(), 32)
    alone, two, *_ = rows(setup, assumptions)
    assert alone.is_launch_bound and alone.shared_is_launch_bound
    assert alone.seconds == replace(setup, batch=64).step(1) <= two.seconds
    assert two.worth <= 0.5
    assert two.pays_from > 64


def test_the_answer_has_every_number_of_gpus_and_facts(texts_file, tmp_path, capsys):
    kept = tmp_path / "answer.json"
    program.main(["predict", texts_file, "--gpu", "h200", "--batch", "48", "--json", str(kept)])
    printed = capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert [row["gpus"] for row in found["predict"]] == [2**exponent for exponent in range(10)]
    assert printed.startswith("A PREDICTION, not a measurement, for a batch of 48 on each GPU:\ntexts:build on H200,")
    assert printed.splitlines()[-3:] == found["facts"]
    table, _, _ = printed.partition("Worth 90 %")
    assert max(map(len, table.splitlines())) <= 86


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["FILE:fails"], "cannot be built: ValueError: no weights"),
        (["FILE:number"], "returns a int, not a module"),
        (["FILE:frozen"], "has no parameter to train"),
        (["FILE:wrong"], "the forward of mine:wrong failed: RuntimeError"),
        (["FILE:rows"], "the loss must be a scalar tensor, not a tensor of shape (2,)"),
        (["FILE:table"], "multiplies nothing"),
        (["torchvision:resnet18", "--measured-ms", "0"], "must be a number above 0"),
        (["torchvision:resnet18", "--gpu", "abacus"], "invalid choice: 'abacus'"),
        (["torchvision:resnet18", "--batch", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(arguments, message, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def fails(): raise ValueError('no weights')\n"
        "def number(): return 5\n"
        "def frozen(): return nn.Linear(4, 5).requires_grad_(False)\n"
        "def wrong(): return nn.Linear(5, 5)\n"
        "def rows(): return nn.Linear(4, 5)\n"
        "class Table(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(4))\n"
        "    def forward(self, inputs): return self.weight + inputs\n"
        "def table(): return Table()\n"
        "def batch(n): return torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)\n"
        "def loss(outputs, targets):\n"
        "    if outputs.shape[1] == 4: return outputs.mean()\n"
        "    return nn.functional.cross_entropy(outputs, targets, reduction='none')\n"
    )
    with pytest.raises(SystemExit) as end:
        program.main(["predict", *(text.replace("FILE", str(path)) for text in arguments)])
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1]
    assert "Traceback" not in "".join(error)


def test_a_network_whose_shapes_depend_on_numbers_is_counted_by_computing(tmp_path):
    path = tmp_path / "picky.py"
    path.write_text(
        "from torch import nn\n"
        "class Picky(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        scores = super().forward(x)\n"
        "        return scores + scores[scores > 0].mean()\n"
        "def build():\n"
        "    return Picky(10, 5000)\n"
    )
    network = counted_of(spec.load(f"{path}:build", (10,)))
    assert network.multiply_adds == 5000 * 10


RECURRENT = """
import torch
from torch import nn
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.KIND(6, 16, num_layers=LAYERS, bidirectional=DIRECTIONS == 2, batch_first=True)
        self.score = nn.Linear(16 * DIRECTIONS, 3)
    def forward(self, sounds):
        return self.score(self.layer(sounds)[0][:, -1])
def build(): return Recurrent()
def batch(n): return torch.zeros(n, 20, 6), torch.zeros(n, dtype=torch.long)
"""


@pytest.mark.parametrize(
    "layers, directions",
    [
        (3, 2),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind, gates", [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_each_gate_of_each_time_step_layer_and_direction_is_counted(kind, gates, layers, directions, tmp_path):
    path = tmp_path / "recurrent.py"
    text = RECURRENT.replace("KIND", kind).replace("LAYERS", str(layers)).replace("DIRECTIONS", str(directions))
    path.write_text(text)
    steps, hidden = 20, 16
    inputs = [6] + [hidden * directions] * (layers - 1)
    of_layers = sum(directions * steps * gates * hidden * (width + hidden) for width in inputs)
    network = counted_of(spec.load(f"{path}:build"))
    assert network.multiply_adds == of_layers + hidden * directions * 3


def test_the_launches_of_recurrent_layers_are_left_out(tmp_path):
    """cuDNN fuses what is counted here step by step in time, so such a network is not bound by its launches."""
    path = tmp_path / "recurrent.py"
    path.write_text(RECURRENT.replace("KIND", "GRU").replace("LAYERS", "1").replace("DIRECTIONS", "1"))
    found = count(spec.load(f"{path}:build"), 8)
    assert found.recurrent
    setup, _ = prediction(found, A100, Hardware(), 8)
    assert setup.training.launches == 0
