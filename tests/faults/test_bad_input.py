"""Flags made by the hundred: settings that can be used, or an error of one line."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import ladder
from common.args import parse_args
from common.errors import UserError
from common.settings import fit_to_machine

NUMBERS = st.one_of(
    st.integers(-3, 200).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "1e999", "0x10", "١٢", "1_0", "٣٫٥", "-0", "+1", "nan", "True", "1 "]),
    st.text(max_size=5),
)
FLAGS = [
    "--epochs", "--batch-size", "--lr", "--seed", "--dataset", "--data-dir", "--device", "--num-workers", "--max-steps",
    "--no-dropout", "--dtype", "--train-samples", "--eval-samples", "--save", "--json", "--replicas", "--timeout",
    "--mixed-precision", "--gradient-accumulation-steps", "--checkpoint-dir", "--checkpoint-every", "--tensor",
    "--help-me", "-x",
]  # fmt: skip


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    level=st.sampled_from(ladder.SCRIPTS),
    pairs=st.lists(st.tuples(st.sampled_from(FLAGS), NUMBERS, st.booleans()), max_size=4),
)
def test_any_flags_are_settings_that_can_be_used_or_one_line(level, pairs, capsys):
    argv = []
    for flag, value, is_joined in pairs:
        argv += [f"{flag}={value}"] if is_joined else [flag, value]
    try:
        args = fit_to_machine(parse_args(str(ladder.script(level)), argv))
    except UserError as error:
        assert error.code == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1, captured.err
    else:
        assert args.lr > 0 and args.epochs >= 1 and args.seed < 2**32 - 2**16
        if args.timeout is not None:
            assert 1 <= args.timeout.total_seconds() <= 10**6
