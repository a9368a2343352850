"""Pairs of runs that must end alike: levels are compared with levels, and scripts on ours with scripts on the original.

The levels, their templates and the small programs end with the same weights, but for rounding. A script has the same
outcome on both libraries, to the last bit. The example is the script that seed 4 draws in `random_orders.py`, on two
processes:

1. A script is drawn. It is a dataclass of settings: `draw(4, processes=2)` is `Script(n=47, batch=4,
   data="stream of its epoch", even_batches=False, …)`. It loops over a stream of 47 numbers, 4 a process in each step.
2. It is changed where the libraries differ on purpose. `without_known_differences(script)` has `even_batches=True`,
   because the original fills up the last step of a stream in any case. A test of ours is named beside each change.
3. Both libraries run it on every rank: `run("accelerate", script, folder, seen)`, `run("common.accelerator", …)`. They
   fill the dict `seen` with what the script sees, here the numbers of each batch and the random number after it.
4. The outcomes are compared. `differences(ours, theirs)` has the places at which a bit differs, and here it has none.
   For the script as it was drawn it has "1.loops.0.batches.5.0.3": on rank 1, in the first loop, the sixth batch has a
   fourth number on the original only.

`random_scripts.py` takes these steps. Other scripts are written by hand, or are published programs.
"""
