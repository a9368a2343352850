"""Differential tests: the same script runs on the original and on ours, and both must end with the same bits.

The example is the script that seed 8 draws in `random_orders.py`, on two processes:

1. A script is drawn. It is a dataclass of settings: `draw(8, processes=2)` is
   `Script(n=9, batch=2, sampler="sequential", dispatch_batches=True, skip=1, …)`, a loop over 9 samples.
2. It is changed where the libraries differ on purpose. `without_known_differences(script)` has `n=17, skip=0`, because
   the original would crash over 9 samples, and would skip other batches. A test of ours is named beside each change.
3. Both libraries run it on every rank: `run("accelerate", script, folder, seen)`, `run("common.accelerator", …)`. They
   fill the dict `seen` with what the script sees, here the samples of each batch and the random number after it.
4. The outcomes are compared. `differences(ours, theirs)` has the places at which a bit differs. One of them could be
   "1.loops.0.batches.3": rank 1, the first loop, the fourth batch.

`random_scripts.py` takes these steps. Other tests compare scripts that are written by hand: levels, published programs.
"""
