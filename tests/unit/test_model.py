"""BasicNet is the network that it says it is."""

from argparse import Namespace

import torch

from common.model import BasicNet, build_model


def flags(**changes):
    return Namespace(**({"seed": 42, "no_dropout": False, "dtype": torch.float32} | changes))


def test_it_has_1199882_parameters_and_returns_log_probabilities():
    model = BasicNet().eval()
    assert sum(p.numel() for p in model.parameters()) == 1_199_882
    log_probs = model(torch.randn(3, 1, 28, 28))
    assert log_probs.shape == (3, 10)
    torch.testing.assert_close(log_probs.exp().sum(dim=1), torch.ones(3))


def test_log_softmax_with_nll_loss_is_cross_entropy_on_logits():
    logits, targets = torch.randn(5, 10, dtype=torch.float64), torch.randint(10, (5,))
    ours = torch.nn.functional.nll_loss(torch.log_softmax(logits, 1), targets)
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(logits, targets))


def test_weights_depend_on_the_seed_alone():
    torch.rand(3)
    first, again, other = build_model(flags()), build_model(flags()), build_model(flags(seed=43))
    assert torch.equal(first.fc1.weight, again.fc1.weight) and not torch.equal(first.fc1.weight, other.fc1.weight)
    assert torch.equal(build_model(flags(dtype=torch.float64)).fc1.weight.float(), first.fc1.weight)


def test_dropout_can_be_left_out():
    images = torch.randn(2, 1, 28, 28)
    with_dropout, without = build_model(flags()), build_model(flags(no_dropout=True))
    assert with_dropout.state_dict().keys() == without.state_dict().keys()
    assert not torch.equal(with_dropout(images), with_dropout(images))
    assert torch.equal(without(images), without(images))
