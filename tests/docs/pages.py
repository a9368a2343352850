"""What is written for readers: the READMEs, the docstrings of modules, and the commands in them."""

import ast
import re
import shlex
from pathlib import Path

from common import ladder

READMES = sorted(
    path
    for path in ladder.ROOT.rglob("README.md")
    if not any(part.startswith(".") for part in path.relative_to(ladder.ROOT).parts)
)
# Every page, also those that lie beside a README.
PAGES = sorted(
    path
    for path in ladder.ROOT.rglob("*.md")
    if not any(part.startswith(".") and part != ".github" for part in path.relative_to(ladder.ROOT).parts)
)
MODULES = sorted(
    path
    for folder in ("0?_*", "common", "benchmarks")
    for top in ladder.ROOT.glob(folder)
    for path in top.rglob("*.py")
)
# In a sentence, the name of a program and no command.
NAME_OF_A_PROGRAM = re.compile(r"python -m ([\w.]+)")
# What a command in the text leaves to its reader.
PLACEHOLDERS = {"NAME": "padded_evaluation"}


def name(path: Path) -> str:
    return str(path.relative_to(ladder.ROOT))


def commands(path: Path) -> list[list[str]]:
    """The commands that start Python or pytest in a page or in a module's docstring, as lists of words."""
    text, code = path.read_text(), r"^    (.*)$"
    if path.suffix == ".py":
        text, code = ast.get_docstring(ast.parse(text)) or "", r"^ *(python .*|    .*)$"
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    blocks = [line for block in re.findall(r"^```.*?^```$", joined, re.M | re.S) for line in block.splitlines()]
    lines = [line.strip() for line in [*re.findall(code, joined, re.M), *blocks]]
    lines = [re.split(r"\s{2,}", line)[0] for line in lines]  # what follows is an explanation
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", joined)]
    lines += [code for code in inline if not NAME_OF_A_PROGRAM.fullmatch(code)]
    lines = [re.sub(r"^([A-Z_]+=\S+ )+|( &)$", "", line) for line in lines]
    found = [line for line in lines if re.match(r"(torchrun |pytest |python (-m |\S+\.py))", line)]
    concrete = [command for command in dict.fromkeys(found) if not re.search(r"[…<|]", command)]
    split = [shlex.split(command, comments=True) for command in concrete]
    return [[PLACEHOLDERS.get(word, word) for word in words] for words in split if len(words) > 1]


def prose(text: str) -> str:
    """A README without its generated parts and its code."""
    text = re.sub(r"^<!-- (\w+)[^\n]* -->\n.*?^<!-- /\1 -->$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    .*$", "", text, flags=re.MULTILINE)


def section(level: str, title: str, page: str = "README.md") -> str:
    """What a page of a level says under a heading."""
    text = (ladder.ROOT / level / page).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
