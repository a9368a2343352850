"""The doctor: somebody's training script, run on several processes and looked over for the mistakes of common/pitfalls.

python -m common.doctor my_train.py --epochs 2

launch            starts the script on each rank, as torchrun would, by
  run_script        which installs the observers and runs the script:
    watch_*           observers of networks, optimizers, data and calls
    watcher           guards them, and has the `Record` that they fill
    heartbeat         shows that the rank gets on, and stops it where it hangs
compare_*         checks: each compares the records of all ranks, and gives an `Answer`
report            asks all checks, and says what they have found
"""
