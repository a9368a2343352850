"""The names that programs read from transformers' Trainer: there with the same values, or on the page."""

import re
from dataclasses import fields
from operator import attrgetter

import pytest

from common import ladder, trainer
from tests.unit.trainer.both import make, same_on_both

pytestmark = pytest.mark.usefixtures("transformers")

READ_BY_PROGRAMS = [
    "deepspeed", "is_deepspeed_enabled", "is_fsdp_enabled", "is_in_train", "label_smoother", "hp_search_backend",
    "can_return_loss", "args.deepspeed", "args.debug", "args.device", "args.local_rank", "args.process_index",
    "args.world_size", "args.distributed_state.num_processes", "args.label_smoothing_factor",
    "args.eval_do_concat_batches", "args.average_tokens_across_devices", "args.save_strategy.value",
    "args.lr_scheduler_type.value", "args.optim.value",
]  # fmt: skip


def test_programs_read_the_values_of_transformers(tmp_path):
    def script(library, folder):
        everywhere = library.TrainingArguments(folder, report_to="all")
        trainer = make(library, folder)
        values = {name: attrgetter(name)(trainer) for name in READ_BY_PROGRAMS}
        return values | {
            "num_examples": trainer.num_examples(trainer.get_train_dataloader()),
            "get_num_trainable_parameters": trainer.get_num_trainable_parameters(),
            "report_to": everywhere.report_to,
            "autocast_smart_context_manager": type(trainer.autocast_smart_context_manager(cache_enabled=False)),
            "_wrap_model gives the model": trainer._wrap_model(trainer.model) is trainer.model,
        }

    same_on_both(script, tmp_path)


def test_every_missing_argument_and_method_is_named(transformers):
    page = (ladder.ROOT / "common" / "trainer" / "DIFFERENCES.md").read_text()
    _, _, section = page.partition("## What a program may not expect")
    points = [set(re.findall(r"`(\w+)`", point)) for point in section.split("\n- ")]

    def missing(names_of):
        return names_of(transformers) - names_of(trainer)

    methods = missing(lambda library: {name for name in dir(library.Trainer) if name[0] != "_"})
    arguments = missing(lambda library: {field.name for field in fields(library.TrainingArguments)})
    assert methods and any(methods <= point for point in points)
    assert arguments and any(arguments <= point for point in points)
