"""What is written for readers: the READMEs, the docstrings of modules, and the commands in them."""

import ast
import re
import shlex
from pathlib import Path

from common import ladder

READMES = sorted(
    path for path in ladder.ROOT.rglob("README.md") if not any(part.startswith(".") for part in path.parts[1:])
)
MODULES = sorted(
    path
    for folder in ("0?_*", "common", "benchmarks")
    for top in ladder.ROOT.glob(folder)
    for path in top.rglob("*.py")
)


def name(path: Path) -> str:
    return str(path.relative_to(ladder.ROOT))


def commands(path: Path) -> list[list[str]]:
    """The commands that start Python in a README's code or in a module's docstring, as lists of words."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    inline = re.findall(r"`((?:python|torchrun) [^`]+)`", joined)
    found = [line for line in lines if re.match(r"(srun |torchrun |python (-m |\S+\.py))", line)]
    return [
        words
        for command in dict.fromkeys([*found, *(" ".join(command.split()) for command in inline)])
        if (words := shlex.split(command.removeprefix("srun "), comments=True))[1:] and not re.search(r"[…<|]", command)
    ]


def prose(text: str) -> str:
    """A README without its generated parts and its code."""
    text = re.sub(r"^<!-- (\w+)[^\n]* -->\n.*?^<!-- /\1 -->$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
