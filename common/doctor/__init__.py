"""The doctor: somebody's training script, run on several processes and examined for most mistakes of common/pitfalls.

    python -m common.doctor my_train.py --epochs 2

These files work one after the other. The example is a script that steps its scheduler on rank 0 only.

    1. __main__.py    reads the options, and calls what follows
    2. launch.py      starts run_script.py for each rank, as torchrun would start the script, and waits for their end
    3. run_script.py  lets the observers of `checks` watch its rank, and runs the script
    4. checks/        has a file for each subject, as optimizers.py: an observer notes Step([0.1], …), Step([0.05], …)
                      on rank 0, and Step([0.1], …) twice on rank 1; a check compares that, and returns a Finding
    5. report.py      words the results: "FOUND learning rates: the ranks' learning rates differ at 1 of 2 steps; …"
"""
