"""Bad input, made by the thousand: a clear error of a documented type, never a hang, a crash or a wrong number."""

import json
import shutil
from collections import namedtuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from common import ladder
from common.accelerator import Accelerator
from common.accelerator.checkpointing import CheckpointError
from common.args import parse_args
from common.errors import UserError
from common.machine import fit_to_machine
from common.processes import ranks
from tests.parity.random_scripts import differences

SEEDED = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@st.composite
def damages(draw, length: int):
    """What happens to files: cut, lengthened, overwritten, bytes lost in the middle. A function of bytes."""
    kind = draw(st.sampled_from(["cut", "append", "overwrite", "lose", "zero"]))
    at, piece = draw(st.integers(0, length - 1)), draw(st.binary(min_size=1, max_size=8))
    many = draw(st.integers(1, length))

    def damage(content: bytes) -> bytes:
        if kind == "cut":
            return content[:at]
        if kind == "append":
            return content + piece
        middle = {"overwrite": piece, "lose": b"", "zero": bytes(len(content[at : at + many]))}[kind]
        return content[:at] + middle + content[at + (len(piece) if kind == "overwrite" else many) :]

    return damage


NUMBERS = st.one_of(
    st.integers(-3, 200).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "1e999", "9" * 5000, "0x10", "١٢", "1_0", "٣٫٥", "-0", "+1", "nan", "True", "--", "1 "]),
    st.text(max_size=5),
)
FLAGS = [
    "--epochs", "--batch-size", "--lr", "--seed", "--dataset", "--data-dir", "--device", "--num-workers", "--max-steps",
    "--no-dropout", "--dtype", "--train-samples", "--eval-samples", "--save", "--json", "--replicas", "--timeout",
    "--mixed-precision", "--gradient-accumulation-steps", "--checkpoint-dir", "--checkpoint-every", "--help-me", "-x",
]  # fmt: skip


@settings(max_examples=400, **SEEDED)
@given(
    level=st.sampled_from(ladder.rungs()),
    pairs=st.lists(st.tuples(st.sampled_from(FLAGS), NUMBERS, st.booleans()), max_size=4),
)
def test_any_flags_are_settings_that_can_be_used_or_one_line(level, pairs, capsys):
    argv = [word for flag, value, joined in pairs for word in ([f"{flag}={value}"] if joined else [flag, value])]
    try:
        args = fit_to_machine(parse_args(str(ladder.script(level)), argv))
    except UserError as error:
        assert error.code == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1 and len(captured.err) < 1000, captured.err
    else:
        assert args.lr > 0 and args.epochs >= 1 and args.seed < 2**32 - 2**16
        if hasattr(args, "timeout"):
            assert 1 <= args.timeout.total_seconds() <= 10**6


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An accelerator and the folder of its checkpoint."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    folder = tmp_path_factory.mktemp("checkpoint") / "c"
    accelerator.save_state(folder)
    yield accelerator, model, folder
    accelerator.end_training()


@settings(max_examples=150, **SEEDED)
@given(data=st.data())
def test_a_mutated_file_of_a_checkpoint_is_refused_by_name_and_nothing_is_loaded(saved, data):
    accelerator, model, folder = saved
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content, weight = path.read_bytes(), model.weight.detach().clone()
    changed = data.draw(damages(len(content)))(content)
    same = changed == content
    if path.name == "manifest.json":
        try:  # another spelling of the same manifest is no damage
            same = json.loads(changed) == json.loads(content)
        except ValueError:
            same = False
    with torch.no_grad():
        model.weight.fill_(7)
    path.write_bytes(changed)
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        assert not same and str(folder) in str(error)
        assert (model.weight == 7).all()
    else:
        assert same or path.name == "manifest.json"
        assert torch.equal(model.weight, weight)
    finally:
        path.write_bytes(content)
        with torch.no_grad():
            model.weight.copy_(weight)


@settings(max_examples=100, **SEEDED)
@given(data=st.data())
def test_a_mutated_file_that_the_manifest_vouches_for_raises_and_executes_nothing(saved, data):
    """Whoever can write the manifest too: the readers themselves must hold."""
    from common.accelerator import checkpointing

    accelerator, _, folder = saved
    forged = folder.parent / "forged"
    shutil.rmtree(forged, ignore_errors=True)
    shutil.copytree(folder, forged)
    path = forged / data.draw(st.sampled_from(["model.safetensors", "optimizer.bin", "random_states_0.pkl"]))
    path.write_bytes(data.draw(damages(path.stat().st_size))(path.read_bytes()))
    (forged / "manifest.json").unlink()
    checkpointing.write_manifest(forged)
    try:
        accelerator.load_state(forged)
    except (CheckpointError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        assert str(error)
    finally:
        accelerator.load_state(folder)


# gather_for_metrics: the same structure, of the same random shape, from every rank

Pair = namedtuple("Pair", "one other")
LEAVES = st.sampled_from(["float32", "int64", "bool", "rows", "names", "number", "none"])
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        # A list without a tensor is no structure: it has an entry per sample.
        st.lists(inner, max_size=2).map(lambda parts: [*parts, "rows"]),
        st.tuples(inner, st.just("int64")),
        st.builds(Pair, st.just("bool"), inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)


def built(structure, indices: torch.Tensor, processes: int | None = None):
    """`structure` with a value made from the samples' indices in place of each leaf's name.

    With `processes` it is what is gathered from as many: a number or None is then a list with one entry for each.
    """
    if isinstance(structure, dict):
        return {key: built(part, indices, processes) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        parts = [built(part, indices, processes) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return {
        "float32": lambda: indices.float(),
        "int64": lambda: indices,
        "bool": lambda: indices % 2 == 0,
        "rows": lambda: torch.stack([indices, -indices], dim=1),
        "names": lambda: [f"sample {index}" for index in indices.tolist()],
        "number": lambda: 3.5 if processes is None else [3.5] * processes,
        "none": lambda: None if processes is None else [None] * processes,
    }[structure]()


def gather_all(structures: list, samples: int) -> list[str]:
    """For each structure "right", or the type of what was raised."""
    accelerator = Accelerator(cpu=True)
    ends = []
    for structure in structures:
        for indices in accelerator.prepare(DataLoader(torch.arange(samples), batch_size=2)):
            try:
                gathered = accelerator.gather_for_metrics(built(structure, indices))
            except (TypeError, ValueError) as error:
                ends.append(type(error).__name__)
            else:
                everyone = accelerator.gather_for_metrics(indices)
                expected = built(structure, everyone, accelerator.num_processes)
                ends.append(f"wrong: {gathered}" if list(differences(gathered, expected)) else "right")
    accelerator.end_training()
    return ends


@pytest.mark.slow
def test_gathered_structures_are_right_or_refused_on_all_ranks_alike():
    structures: list = []

    @settings(max_examples=40, database=None, **SEEDED)
    @given(STRUCTURES)
    def draw(structure):
        structures.append(structure)

    draw()
    for samples in (4, 3, 2):  # of which the second rank has two, one and none
        first, second = ranks(2).run(gather_all, structures, samples)
        assert first == second
        assert set(first) <= {"right", "TypeError", "ValueError"}, [end for end in first if "wrong" in end][:3]
        assert first.count("right") > 5
