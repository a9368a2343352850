"""One clear line for the user, said once however many processes run."""

import os
import sys
from pathlib import Path
from typing import NoReturn


class UserError(SystemExit):
    """An error that the user can correct. Its line is on stderr already; the exit code is 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 2


def fail(message: str) -> NoReturn:
    """Print `message` on stderr, if no other rank of this machine has printed an error, and raise UserError."""
    message = " ".join(message.split("\n"))
    if _acquire_print_lock():
        print(f"error: {message}", file=sys.stderr, flush=True)
    raise UserError(message)


def _acquire_print_lock() -> bool:
    """Return True to one process of those that torchrun has started here; without torchrun to every process.

    All ranks may meet the same error, and torchrun ends the others as soon as one has ended, so rank 0 may never come
    to print it. torchrun has made one folder for the errors of all ranks. The first rank that can make a file in it
    prints.
    """
    own_error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not own_error_file:
        return True
    try:
        (Path(own_error_file).parents[1] / "printed").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # The folder is gone, or the variable is another launcher's.
        return True
    return True
