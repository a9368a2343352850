"""The doctor: somebody's training script, run on several processes and looked over for the mistakes of the lab.

    python -m common.doctor my_train.py --epochs 2

`launch` starts the script as torchrun would. In each process `watched` installs the observers (`watch_models`,
`watch_data`, `watch_calls`), runs the script and writes a `Record`. The checks of `compare_…` and `ends` compare the
records of the ranks, and `report` says what that means. The lab is common/pitfalls.
"""
