"""Networks as users of `benchmarks.your_network` would have them in a file, and the need of one."""

from benchmarks.your_network import memory
from benchmarks.your_network.network import UserNetwork
from benchmarks.your_network.settings import Setting


def need(network: UserNetwork, setting: Setting, samples: int) -> memory.DeviceBytes:
    """The need of a step of so many samples on each device."""
    with memory.simulated_training(network, setting) as training:
        return training.need(samples)


TEXTS = '''
import torch
from torch import nn

class Texts(nn.Module):
    """Two inputs, attention, and a parameter beside children."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 32)
        self.scale = nn.Parameter(torch.ones(32))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
        self.score = nn.Linear(32, 3)

    def forward(self, words, lengths):
        hidden = self.words(words) * self.scale
        hidden[:, 0] += lengths[:, None]
        for block in self.blocks:
            hidden = block(hidden)
        return {"scores": self.score(hidden.mean(dim=1))}

def build():
    return Texts()

def batch(n):
    return {"words": torch.randint(500, (n, 24)), "lengths": torch.rand(n)}, torch.randint(3, (n,))

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs["scores"], targets)
'''


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
