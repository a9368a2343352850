"""The doctor: somebody's training script, run on several processes and looked over for the mistakes of the lab.

    python -m common.doctor my_train.py --epochs 2

    launch            starts the script as torchrun would, each rank by `run_script`
      run_script        installs the observers in its rank, and runs the script
        watch_*           observers of networks, optimizers, data and calls: each notes what happens in the …
        watcher           … `Record` of its rank, and guards the observers
        pulse             shows that the rank gets on, and stops it where it hangs
    compare_*         checks: each compares the records of all ranks, and gives an answer
    report            runs the checks, and prints their answers

`record` and `answers` are what goes from one part to the next. The lab is common/pitfalls.
"""
