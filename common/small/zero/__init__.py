"""ZeRO to read, in three steps; each trains the same weights as DDP and leaves less in a rank's memory.

Under DDP every rank has all parameters, all gradients and the optimizer's whole state, which for AdamW is twice as
large as the parameters. With W ranks, a part of 1/W is enough:

1. `zero1`: Each rank keeps a part of the optimizer's state. It updates its part of every parameter, and the ranks
   exchange the parts.
2. `zero2`: It also keeps only its part of the gradients. As soon as backward has computed one, the rest is dropped.
3. `zero3`: It also keeps only its part of the parameters. A layer is gathered when it computes, and dropped again. FSDP
   does this.

A step is written as without ZeRO:

    optimizer = ZeRO1(model, torch.optim.AdamW, lr=1e-3)
    F.nll_loss(model(images), targets).backward()
    optimizer.step()
    optimizer.zero_grad()

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020.
"""

from common.small.zero.zero1 import ZeRO1
from common.small.zero.zero2 import ZeRO2
from common.small.zero.zero3 import ZeRO3

__all__ = ["ZeRO1", "ZeRO2", "ZeRO3"]
