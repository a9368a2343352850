"""The doctor: somebody's training script, run on several processes and examined for the mistakes of common/pitfalls.

    python -m common.doctor my_train.py --epochs 2

What happens then, file by file:

    1. __main__.py    reads the options, and calls what follows
    2. launch.py      starts run_script.py for each rank, as torchrun would start the script, and waits for their end
    3. run_script.py  installs the observers on its rank, and runs the script
    4. observers/     wrap functions of torch, and note what the script does with them
    5. record.py      defines what they note; each rank leaves its record in a file
    6. checks/        compare the records of all ranks, each for one kind of mistake
    7. answers.py     defines what a check says: a finding, no mistake, or nothing to examine
    8. report.py      turns the answers into the lines that are printed

A mistake is examined by an observer that notes what shows it, and a check that compares it, with a record between them:
the observers know nothing of the checks, and the checks nothing of torch's functions.
"""
