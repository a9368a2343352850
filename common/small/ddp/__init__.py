"""DistributedDataParallel to read, in three steps; each trains the same weights as torch's.

1. `naive`: when backward has ended, average every gradient over the ranks. Correct, and slow: the network is idle while
   the rank computes, and the rank is idle while the network sends.
2. `overlapped`: average a gradient as soon as backward has computed it. Most of the sending happens while backward
   computes the gradients of earlier layers.
3. `bucketed`: collect gradients until they fill a bucket, and send the bucket. A message costs a latency whatever its
   size, so a few large ones are faster than many small ones.

torch's own does what `bucketed` does, in C++. It also sends the buffers of rank 0 (running means of BatchNorm, for
instance) before nearly every training forward, and learns in the first step in which order the gradients come. With
`find_unused_parameters=True` it finds parameters that took no part in a forward. After an error in backward a script
can go on with torch's, and not with these.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from common.small.ddp.bucketed import BucketedDDP
from common.small.ddp.naive import NaiveDDP
from common.small.ddp.overlapped import OverlappedDDP

__all__ = ["BucketedDDP", "NaiveDDP", "OverlappedDDP"]
