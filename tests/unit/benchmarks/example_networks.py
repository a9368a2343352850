"""Networks as users of `benchmarks.your_network` would have them in a file, and the memory of a step of one."""

from pathlib import Path

from benchmarks.your_network.simulated_training import Peaks, simulated_training
from benchmarks.your_network.strategies import Setting
from benchmarks.your_network.user_network import UserNetwork

SENTENCES_SPEC = f"{Path(__file__).with_name('sentences.py')}:build"


def simulated_peaks(network: UserNetwork, setting: Setting, samples: int) -> Peaks:
    with simulated_training(network, setting) as training:
        return training.peaks_of_step(samples)


def decoder(length: int, attention: str) -> str:
    """A file with a unit of attention over texts of so many words; `attention` is its text."""
    return f"""
from torch.nn.functional import scaled_dot_product_attention
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(32, 96, bias=False)
        self.score = nn.Linear(32, 3, bias=False)
    def forward(self, x):
        heads = self.inputs(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.score({attention}.transpose(1, 2).flatten(2))
def build(): return nn.Sequential(Decoder())
def batch(n): return torch.randn(n, {length}, 32), torch.zeros(n, {length}, dtype=torch.long)
def loss(scores, classes): return F.cross_entropy(scores.flatten(0, 1), classes.flatten())
"""
