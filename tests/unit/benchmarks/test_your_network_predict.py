"""The prediction for a network of somebody else's: its counts, and that it is `benchmarks.predict`'s own."""

import json
from dataclasses import replace

import pytest
from torchvision import models

from benchmarks.predict import presets
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Hardware
from benchmarks.predict.step import speed_up, step
from benchmarks.your_network import __main__ as program
from benchmarks.your_network import predict, spec

A100 = presets.GPUS["a100"]


def test_the_counts_of_two_inputs_and_attention_are_those_counted_by_hand(texts):
    network = predict.counted(texts)
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
    assert predict.counted(spec.load(f"{path}:build")).operators == 3 + 5 + 9


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
    network = predict.counted(spec.load(f"{path}:build"))
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
    network = predict.counted(spec.load(f"{path}:build", (8,)))
    assert network.parameters == 8 * 8 + 8 + 8
    assert network.multiply_adds == 3 * 8 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg16", "vit_b_16", "convnext_tiny"])
def test_parameters_and_multiply_adds_are_those_that_torchvision_publishes(name):
    published = models.get_model_weights(name).IMAGENET1K_V1.meta
    network = predict.counted(spec.load(f"torchvision:{name}"))
    assert network.parameters == published["num_params"]
    assert network.multiply_adds / 1e9 == pytest.approx(published["_ops"], abs=0.001)


@pytest.mark.parametrize(
    "name, spec_of_it", [("VGG-16", "vgg16"), pytest.param("ResNet-50", "resnet50", marks=pytest.mark.slow)]
)
def test_the_prediction_is_that_of_the_predictor(name, spec_of_it):
    """Counted without memory here, and on torch's meta device there."""
    own = predict.counted(spec.load(f"torchvision:{spec_of_it}"))
    theirs = networks()[name]
    assert (own.layers, own.operators, own.bytes_of_a_sample) == (
        theirs.layers,
        theirs.operators,
        theirs.bytes_of_a_sample,
    )
    hardware = Hardware()
    setup, assumptions = predict.prediction(own, A100, hardware, batch=64)
    training = presets.training(theirs, A100)
    cluster = presets.cluster(hardware.inner, hardware.network, hardware.gpus_per_node)
    for row in predict.rows(setup, assumptions):
        assert row["seconds"] == step(training, 64, row["gpus"], cluster)
        assert row["fastest"] <= row["seconds"] <= row["slowest"]
        if row["divided_seconds"]:
            faster = speed_up(training, 64, row["gpus"], cluster)
            assert training.compute(64) / row["divided_seconds"] == pytest.approx(faster)


@pytest.mark.parametrize("milliseconds", [250.0, 0.1])
def test_a_step_that_was_measured_is_the_step_on_one_gpu(milliseconds):
    """Also where it is shorter than its launches are assumed to be."""
    network = networks()["ResNet-50"]
    gpu = predict.measured(network, 48, milliseconds)
    setup, assumptions = predict.prediction(network, gpu, Hardware(), 48, is_measured=True)
    alone, two, *_ = predict.rows(setup, assumptions)
    assert alone["seconds"] == pytest.approx(milliseconds / 1000)
    assert alone["fastest"] == alone["slowest"] == alone["seconds"]
    assert two["seconds"] > alone["seconds"]


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


def test_a_score_for_each_pair_of_samples_is_counted_in_the_batch_that_was_asked_for(pairs, capsys):
    network = spec.load(pairs)
    few = predict.counted(network)
    assert few.multiply_adds == 64 * 64 + 2 * 64
    assert not predict.is_proportional(network, few)
    many = predict.counted(network, 1024)
    assert many.multiply_adds == 64 * 64 + 1024 * 64
    assert many.bytes_of_a_sample > few.bytes_of_a_sample + 1024 * 4
    program.main(["predict", pairs, "--batch", "1024"])
    assert "it is counted in one of 1024." in capsys.readouterr().out


def test_attention_is_proportional_to_the_samples(texts):
    assert predict.is_proportional(texts, predict.counted(texts))


def test_the_update_moves_seven_numbers_a_parameter_of_adamw_and_is_said_not_to_be_in_the_times(pairs, capsys):
    network = spec.load(pairs)
    counts = predict.counted(network)
    held = predict.holding(network, counts, Hardware(), 64)
    assert held.update_bytes == pytest.approx(7 * 4 * counts.parameters, rel=0.001)
    assert held.update_seconds == held.update_bytes / 2039e9
    program.main(["predict", pairs])  # launch-bound: the update's kernels fill time in which the GPU would wait
    assert "the optimizer's update" not in capsys.readouterr().out
    program.main(["predict", pairs, "--batch", "2048"])
    answer = capsys.readouterr().out
    assert "the optimizer's update moves 86 MiB" in answer
    assert ", and its update takes 0.04 ms more. On 2 GPUs" in answer


def test_a_batch_that_the_gpu_cannot_hold_is_not_advised(texts_file, capsys, monkeypatch):
    # A GPU of 16 GiB would need as much address space here, and then the system may refuse to fork this process.
    monkeypatch.setitem(presets.MEMORY, "p100", presets.Memory(2, 732))
    program.main(["predict", texts_file, "--gpu", "p100", "--batch", "16384"])
    take = capsys.readouterr().out.splitlines()[-3]
    assert take.startswith("Take a smaller batch: 16384 samples need 2.")
    assert "this GPU has 2." in take


@pytest.mark.parametrize(
    "batch, network, change",
    [
        (1, "8x400g", "a larger batch: from "),
        (16, "25g", "a larger batch: from "),
        (4096, "8x400g", "With --network 25g they are worth"),
    ],
)
def test_what_would_change_it_helps_more_gpus_or_fewer(batch, network, change):
    hardware = Hardware(network=network)
    setup, assumptions = predict.prediction(networks()["BERT-large"], A100, hardware, batch)
    found = predict.rows(setup, assumptions)
    most = predict._most_that_pay(found)["gpus"]
    line = predict.verdict(setup, found, is_measured=True)[-1]
    assert change in line
    assert ("--network 8x400g" in line) == (network == "25g" and 2 * most > hardware.gpus_per_node)
    if most < 512:
        batch = int(line.partition("from ")[2].partition(" ")[0])
        larger, assumptions = predict.prediction(networks()["BERT-large"], A100, hardware, batch)
        paid = next(row for row in predict.rows(larger, assumptions) if row["gpus"] == 2 * most)
        assert paid["efficiency"] >= predict.PAYS


def test_gpus_pay_only_where_fewer_with_more_samples_each_are_slower():
    """A step of BasicNet is launch-bound: one GPU takes 64 samples in the time of 32."""
    basic_net = networks()["BasicNet"]
    setup, assumptions = predict.prediction(basic_net, A100, Hardware(), 32)
    found = predict.rows(setup, assumptions)
    two = found[1]
    assert setup.step(1) == replace(setup, batch=64).step(1) <= two["seconds"]
    assert two["efficiency"] <= 0.5
    take, why, change = predict.verdict(setup, found, is_measured=True)
    assert take.startswith("Stay on one GPU (level 00): two are worth 1.0 with 32 samples on each.")
    free = int(why.partition("a larger batch is free, up to some ")[2].partition(" ")[0])
    assert setup.training.kernels(free) == pytest.approx(setup.training.launches, rel=0.02)
    least = int(change.partition("from ")[2].partition(" ")[0])
    assert replace(setup, batch=least).training.kernels(least) > setup.training.launches


@pytest.mark.parametrize("name", ["BasicNet", "ResNet-50", "BERT-large"])
def test_no_batch_is_advised_with_which_fewer_gpus_would_do(name):
    setup, assumptions = predict.prediction(networks()[name], A100, Hardware(), 2**19)
    change = predict.verdict(setup, predict.rows(setup, assumptions), is_measured=True)[-1]
    assert "fewer than " in change
    least = int(change.partition("fewer than ")[2].partition(" ")[0])
    with_it = replace(setup, batch=least)
    for gpus in predict.COUNTS:
        on_fewer = replace(setup, batch=512 * least / gpus).step(gpus)
        assert on_fewer >= predict.PAYS * 512 / gpus * with_it.step(512)


def test_rows_that_starting_operators_decides_are_marked_and_explained():
    setup, assumptions = predict.prediction(networks()["ResNet-50"], A100, Hardware(), 64)
    lines = predict.table(predict.rows(setup, assumptions), 64).splitlines()
    for gpus, line in zip(predict.COUNTS, lines[2:12], strict=True):
        is_bound = gpus <= 64 and setup.training.kernels(64 / gpus) <= setup.training.launches
        assert ("*" in line) == is_bound
    assert "*" in lines[8]  # 64 GPUs
    assert any(line.startswith("*: launch-bound.") for line in lines)
    large, assumptions = predict.prediction(networks()["ResNet-50"], A100, Hardware(), 2**15)
    assert "*" not in predict.table(predict.rows(large, assumptions), 2**15)


def test_the_answer_has_every_number_of_gpus_a_page_and_a_verdict(texts_file, tmp_path, capsys):
    kept = tmp_path / "answer.json"
    page = tmp_path / "page.html"
    flags = ["--gpu", "h200", "--batch", "48", "--page", str(page), "--json", str(kept)]
    program.main(["predict", texts_file, *flags])
    printed = capsys.readouterr().out
    answer = json.loads(kept.read_text())
    assert [row["gpus"] for row in answer["predict"]] == [2**exponent for exponent in range(10)]
    assert printed.startswith("A PREDICTION, not a measurement, for a batch of 48 on each GPU:\ntexts:build on H200,")
    assert printed.splitlines()[-3:] == answer["verdict"]
    tables, _, _ = printed.partition("Written to")
    assert max(map(len, tables.splitlines())) <= 80
    text = page.read_text()
    assert '<option value="texts:build" selected>' in text
    assert '<option value="h200" selected>' in text
    logarithm = 5.584963
    assert f'min="0.584963" max="12.584963" step="1" value="{logarithm}"' in text
    assert round(2**logarithm) == 48


def test_the_page_of_a_measured_step_has_the_gpu_that_was_measured(texts_file, tmp_path):
    page = tmp_path / "page.html"
    program.main(["predict", texts_file, "--measured-ms", "5", "--page", str(page)])
    assert '<option value="own" selected>your GPU, measured: 5 ms for 64</option>' in page.read_text()


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
    network = predict.counted(spec.load(f"{path}:build", (10,)))
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
    network = predict.counted(spec.load(f"{path}:build"))
    assert network.multiply_adds == of_layers + hidden * directions * 3


def test_an_operator_that_multiplies_and_is_not_known_is_named(tmp_path, capsys):
    path = tmp_path / "pairs.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Pairs(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.pairs = nn.Bilinear(8, 8, 8)\n"
        "        self.score = nn.Linear(8, 3)\n"
        "    def forward(self, x):\n"
        "        return self.score(self.pairs(x, x))\n"
        "def build(): return Pairs()\n"
        "def alone(): return nn.Linear(8, 3)\n"
        "def batch(n): return torch.zeros(n, 8), torch.zeros(n, dtype=torch.long)\n"
    )
    program.main(["predict", f"{path}:build"])
    assert "Not counted: what aten._trilinear multiplies" in capsys.readouterr().out
    program.main(["predict", f"{path}:alone"])
    assert "Not counted" not in capsys.readouterr().out


def test_the_launches_of_recurrent_layers_are_left_out_and_it_is_said(tmp_path, capsys):
    """cuDNN fuses what is counted here step by step in time, so such a network is not bound by its launches."""
    path = tmp_path / "spoken.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Spoken(nn.Module):\n"
        "    def __init__(self, layer):\n"
        "        super().__init__()\n"
        "        self.layer = layer\n"
        "        self.score = nn.Linear(8, 3)\n"
        "    def forward(self, sounds):\n"
        "        hidden = self.layer(sounds)\n"
        "        return self.score((hidden[0] if isinstance(hidden, tuple) else hidden)[:, -1])\n"
        "def gru(): return Spoken(nn.GRU(8, 8, batch_first=True))\n"
        "def linear(): return Spoken(nn.Linear(8, 8))\n"
        "def batch(n): return torch.zeros(n, 40, 8), torch.zeros(n, dtype=torch.long)\n"
    )
    program.main(["predict", f"{path}:gru", "--page", str(tmp_path / "page.html")])
    of_gru = capsys.readouterr().out
    program.main(["predict", f"{path}:linear"])
    of_linear = capsys.readouterr().out
    assert "the time of launching them is left out" in of_gru
    assert "Starting the operators takes longer" not in of_gru
    assert "left out" not in of_linear
    assert "Starting the operators takes longer" in of_linear
