"""The page of differences names all arguments and methods that are missing here."""

import re
from dataclasses import fields

from common import ladder, trainer

PAGE = (ladder.ROOT / "common" / "trainer" / "DIFFERENCES.md").read_text()


def test_every_missing_argument_and_method_is_named(transformers):
    _, _, section = PAGE.partition("## What a program may not expect")
    points = [set(re.findall(r"`(\w+)`", point)) for point in section.split("\n- ")]

    def missing(names_of):
        return names_of(transformers) - names_of(trainer)

    methods = missing(lambda library: {name for name in dir(library.Trainer) if name[0] != "_"})
    arguments = missing(lambda library: {field.name for field in fields(library.TrainingArguments)})
    assert methods and any(methods <= point for point in points)
    assert arguments and any(arguments <= point for point in points)
