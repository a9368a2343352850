"""The doctor: somebody's training script, run on several processes and examined for most mistakes of common/pitfalls.

    python -m common.doctor my_train.py --epochs 2

These files then work one after the other. The example is a script that steps its scheduler on rank 0 only.

    1. __main__.py    reads the options, and calls what follows
    2. launch.py      starts run_script.py for each rank, as torchrun would start the script, and waits for their end
    3. run_script.py  installs the observers on its rank, and runs the script
    4. observers/     are called by torch, and note what the script does: the learning rates of each optimizer step
    5. record.py      defines the notes: on rank 0 Step([0.1], …), Step([0.05], …). Each rank leaves its own in a file
    6. checks/        compare the records of all ranks: rank 1 has Step([0.1], …) twice
    7. answers.py     defines what a check says: a Finding, Right, or NotExamined
    8. report.py      words the answers: "FOUND learning rates: the ranks' learning rates differ at 1 of 2 steps; …"
"""
