"""One clear line for the user, said once however many processes run."""

import contextlib
import os
import signal
import sys
import time
from typing import NoReturn


class UserError(SystemExit):
    """A wish of the user's that cannot be fulfilled. The line is on stderr already. Uncaught, it exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message

    def __str__(self) -> str:
        return self.message


def fail(message: str) -> NoReturn:
    """Print `message` on stderr and raise UserError.

    All local ranks meet the same error at about the same time. The first speaks; the others give it some seconds
    to do so and to be ended by the launcher, and speak for themselves only if that has not happened.
    """
    message = " ".join(message.split("\n"))
    if len(message) > 800:  # somebody's file, or a number of 5000 digits
        message = f"{message[:400]} … {message[-400:]}"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        with contextlib.suppress(ValueError):  # of a thread: only the main one can
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a level that saves on SIGTERM would stay
        time.sleep(15)
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise UserError(message)
