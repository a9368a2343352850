"""The doctor: somebody's training script, run on several processes and examined for most mistakes of common/pitfalls.

    python -m common.doctor my_train.py --epochs 2

These files work one after the other. The example is a script that steps its scheduler on rank 0 only.

    1. __main__.py    reads the options, and calls what follows
    2. launch.py      starts run_script.py for each rank, as torchrun would start the script, and waits for their end
    3. run_script.py  lets the observers of `checks` watch its rank, and runs the script
    4. checks/        has a file for each subject, as optimizers.py. Its observer is called by torch, and notes what the
                      script does: on rank 0 Step([0.1], …), Step([0.05], …). record.py defines the notes
    5. checks/        compares the records of all ranks: rank 1 has Step([0.1], …) twice. So the result is a Finding,
                      which results.py defines
    6. report.py      words the results: "FOUND learning rates: the ranks' learning rates differ at 1 of 2 steps; …"
"""
