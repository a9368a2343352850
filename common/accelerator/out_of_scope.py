"""Stand-ins for what is out of scope here: they can be imported and asked about, and say so when they are used.

A script that names a class in `isinstance`, or imports a function for a case that does not occur, runs. One that
creates an object or calls the function gets a NotImplementedError with the name of what it asked for.
"""

from collections.abc import Callable
from typing import Any, NoReturn


class OutOfScope:
    """The base of classes that exist in name only.

    Raises:
        NotImplementedError: for each attempt to create an object.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(refusal(type(self).__name__))


def out_of_scope(name: str) -> Callable[..., NoReturn]:
    """A function called `name` that raises NotImplementedError, with the name, when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(refusal(name))

    refuse.__name__ = name
    refuse.__qualname__ = name
    vars(refuse)["is_out_of_scope"] = True
    return refuse


def refusal(name: str) -> str:
    """What is said to somebody who asks for `name`."""
    return f"{name} is out of scope here: this core does data parallelism only; use Hugging Face Accelerate for it"
