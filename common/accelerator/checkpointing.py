"""Checkpoints of an Accelerator: their content, and how a run goes on from one as if it had never stopped.

The files bear the names that Accelerate gives them. `utils/checkpoint_folder.py` makes them appear all at once,
`utils/serialization.py` lets them hold nothing that could execute code.
"""

import contextlib
import os
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .logging import get_logger
from .operations import broadcast_object_list, gather_object
from .sampler import SeedableRandomSampler, innermost_sampler
from .shard import index_sampler_of
from .state import PartialState
from .stateful_data_loader import SeedableOrder, StatefulDataLoaderShard
from .utils.checkpoint_folder import (
    PREVIOUS_NAME,
    CheckpointError,
    Manifest,
    Part,
    choose_newest,
    finish_interrupted_save,
    is_whole,
    read_manifest,
    remove_old_checkpoints,
    verify,
)
from .utils.constants import SAFE_WEIGHTS_NAME, SCALER_NAME, WEIGHTS_NAME
from .utils.dataclasses import ProjectConfiguration
from .utils.fsdp_utils import whole_parameters
from .utils.random import get_random_states, set_random_states
from .utils.serialization import load_safely, save_loadable
from .utils.weights import under_names_of, write_safetensors

logger = get_logger(__name__)

OPTIMIZER_FILE = "optimizer.bin"
SCHEDULER_FILE = "scheduler.bin"
SAMPLER_FILE = "sampler.bin"
LOADER_FILE = "dl_state_dict.bin"
CUSTOM_FILE = "custom_checkpoint_{}.pkl"
RANDOM_STATES_FILE = "random_states_{}.pkl"


# All processes, and those that write


class RemoteError(RuntimeError):
    """Raised on a process that met no error itself, because another process met one; it quotes that error."""


def run_on_all_ranks(action: Callable[[], Any], runs_here: bool = True) -> Any:
    """Run `action` where `runs_here` is true, and return its result; if one process raises, all of them raise.

    A collective: all processes must call it. None is left waiting for one that failed.

    Raises:
        RemoteError: on the other processes.
    """
    result = None
    error = None
    try:
        if runs_here:
            result = action()
    except Exception as failure:
        error = failure
    rank = PartialState().process_index
    errors = gather_object([] if error is None else [f"rank {rank}: {type(error).__name__}: {error}"])
    if error is not None:
        raise error
    if errors:
        raise RemoteError(errors[0])
    return result


def _is_writer(on_each_node: bool) -> bool:
    """True for the main process, or for the first one of each machine."""
    state = PartialState()
    return state.is_local_main_process if on_each_node else state.is_main_process


# The name of a save


@dataclass
class _Saves:
    """What this process remembers of its saves.

    Attributes:
        place: the run, and how many collectives this process had taken part in when the last save was named.
        count: the saves that were named there.
        last: its part in the last save without `all_ranks`.
        ranks: those that had a part in that save, or in the checkpoint that was loaded since.
    """

    place: str = ""
    count: int = 0
    last: Part | None = None
    ranks: set[int] = field(default_factory=set)

    def next_name(self) -> str:
        """A name that all ranks find for one save without asking each other, and that no other save has."""
        # All ranks have entered as many collectives when they are at the same line of a script.
        group: Any = dist.group.WORLD
        num_collectives = 0 if group is None else group._get_sequence_number_for_group()
        place = f"{_name_of_run()}-{num_collectives}"
        self.count = self.count + 1 if place == self.place else 1
        self.place = place
        return f"{place}-{self.count}"

    def expected_ranks(self, world_size: int) -> set[int]:
        """The ranks of this run that had a part in the save before, as far as that can still be seen."""
        if self.last is not None:
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(self.last.folder)
                if manifest.save == self.last.save:
                    self.ranks = set(manifest.ranks)
        return {rank for rank in self.ranks if rank < world_size}


_saves = _Saves()
_own_name = uuid.uuid4().hex


def _name_of_run() -> str:
    """A name that the processes of this run have in common, and no other run has."""
    if not dist.is_initialized():
        return _own_name
    # The first that comes here chooses it, and none waits for another.
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set("checkpointing/run", "", _own_name).decode()


# Saving


def save_state(
    accelerator: Any,
    output_dir: str | os.PathLike | None = None,
    safe_serialization: bool = True,
    all_ranks: bool = False,
    **save_model_func_kwargs: Any,
) -> Path:
    """Write everything that the run needs to go on, and return the folder. It waits for no other process.

    The main process writes weights, optimizers, schedulers, the loss scale, seed and epoch of seedable samplers,
    positions of stateful loaders and registered objects; with `save_on_each_node`, one process of every machine does.
    Each process that calls this writes its random generators and, in the middle of an accumulation window, its
    gradients. Other files in the folder stay.

    The main process alone may call it. Then the other ranks' generators and gradients are not there, and a run that
    goes on from it is not exact. `utils/checkpoint_folder.py` says when a checkpoint counts as whole.

    Args:
        output_dir: the folder, where ~ is the home folder; under automatic naming
            `project_dir/checkpoints/checkpoint_{iteration}` instead.
        safe_serialization: write model.safetensors; otherwise pytorch_model.bin.
        all_ranks: all processes call this, and wait for each other. Then the checkpoint appears with all its parts or
            not at all, and what one process meets is raised on all. (The original ignores this argument.)
        save_model_func_kwargs: ignored, as by the original.

    Raises:
        ValueError: without a folder; under automatic naming, if that checkpoint is there already.
        CheckpointError: if a state could not be loaded again, or the folder holds something that is in the way.
        Exception: what this process met (OSError, …). In each case what was there before is untouched.
    """
    config = accelerator.project_configuration
    run = run_on_all_ranks if all_ranks else _run_here
    writes = _is_writer(config.save_on_each_node)
    folder = _folder_to_save(accelerator, output_dir)
    name = _saves.next_name()
    expected = set()
    if all_ranks:
        name = broadcast_object_list([name])[0]
    else:
        expected = _saves.expected_ranks(accelerator.num_processes)
    part = Part(folder, name, accelerator.process_index, accelerator.num_processes, writes)
    try:
        run(lambda: _start(config, part))
        # A state may be put together by a collective, so all that save ask for it, and hooks find weights everywhere.
        weights = run(lambda: [accelerator.get_state_dict(model) for model in accelerator._models])
        run(lambda: _call_save_hooks(accelerator, weights, part.draft))
        contents = run(lambda: _state_dicts(accelerator))
        contents |= _numbered(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, weights)
        if not writes:
            contents = {}
        contents[RANDOM_STATES_FILE.format(part.rank)] = run(lambda: _state_of_rank(accelerator))
        run(lambda: _write(contents, part.draft))
        # With `all_ranks` the writer comes last: all parts are there when the checkpoint appears.
        run(lambda: part.publish(expected), runs_here=not writes)
        expected = run(lambda: part.publish(expected), runs_here=writes)
    except BaseException:
        part.discard()
        raise
    if not all_ranks:
        _saves.last = part
    if expected == {part.rank} and part.world_size > 1 and not config.save_on_each_node:
        others = "random states of the other ranks are only there once these call `save_state` too"
        logger.warning_once("the main process has saved alone: %s", others)
    if config.automatic_checkpoint_naming and config.total_limit is not None:
        run(lambda: remove_old_checkpoints(part.folder, config.total_limit), runs_here=writes)
    config.iteration += 1
    return part.folder


def _run_here(action: Callable[[], Any], runs_here: bool = True) -> Any:
    """`run_on_all_ranks`, but for the others."""
    return action() if runs_here else None


def _folder_to_save(accelerator: Any, output_dir: str | os.PathLike | None) -> Path:
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        return Path(os.path.abspath(accelerator.project_dir), "checkpoints", f"checkpoint_{config.iteration}")
    if output_dir is None:
        raise ValueError("save_state needs a folder unless automatic_checkpoint_naming is on")
    return Path(os.path.abspath(os.path.expanduser(output_dir)))


def _start(config: ProjectConfiguration, part: Part) -> None:
    if part.is_writers and config.automatic_checkpoint_naming and os.path.lexists(part.folder):
        how = "`load_state` first, or set `project_configuration.iteration`"
        raise ValueError(f"Checkpoint directory {part.folder} ({config.iteration}) already exists: {how}")
    part.start()


def _write(contents: dict[str, Any], draft: Path) -> None:
    for name, content in contents.items():
        if name.endswith(".safetensors"):
            write_safetensors(content, draft / name)
        else:
            save_loadable(content, draft / name)


def _call_save_hooks(accelerator: Any, weights: list[dict[str, Any]], draft: Path) -> None:
    """Let the script's hooks change what is saved of the models, or write files of their own into `draft`."""
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, str(draft))


def _state_dicts(accelerator: Any) -> dict[str, Any]:
    """The content of each file but those of the models, on every process: a state may need a collective."""
    return {name: state.state_dict() for name, state in (_objects(accelerator) | _loaders(accelerator)).items()}


def _objects(accelerator: Any) -> dict[str, Any]:
    """All but models and loaders that has a `state_dict`, by the name of its file."""
    custom = {CUSTOM_FILE.format(index): each for index, each in enumerate(accelerator._custom_objects)}
    scalers = [] if accelerator.scaler is None else [accelerator.scaler]
    return {
        **_numbered(OPTIMIZER_FILE, accelerator._optimizers),
        **_numbered(SCHEDULER_FILE, accelerator._schedulers),
        **_numbered(SCALER_NAME, scalers),
        **custom,
    }


def _loaders(accelerator: Any) -> dict[str, Any]:
    """All loaders with a state: their position or, by default, seed and epoch of their seedable sampler.

    Their files are numbered as all loaders are, those without a state too.
    """
    found: dict[str, Any] = {}
    for index, loader in enumerate(accelerator._dataloaders):
        if isinstance(loader, StatefulDataLoaderShard):
            found[_numbered_name(LOADER_FILE, index)] = loader
        elif isinstance(innermost_sampler(index_sampler_of(loader)), SeedableRandomSampler):
            found[_numbered_name(SAMPLER_FILE, index)] = SeedableOrder(loader)
    return found


def _stateful_loaders(accelerator: Any) -> dict[str, StatefulDataLoaderShard]:
    loaders = _loaders(accelerator).items()
    return {name: loader for name, loader in loaders if isinstance(loader, StatefulDataLoaderShard)}


def _numbered(file_name: str, objects: list[Any]) -> dict[str, Any]:
    return {_numbered_name(file_name, index): each for index, each in enumerate(objects)}


def _numbered_name(file_name: str, index: int) -> str:
    """The first is optimizer.bin, the second optimizer_1.bin."""
    return file_name.replace(".", f"_{index}.") if index else file_name


def _state_of_rank(accelerator: Any) -> dict[str, Any]:
    """The states of this process's generators, the batches that its stateful loaders have read ahead and, in the middle
    of a window, the gradients of each model so far.
    """
    state = {"step": accelerator.step, **get_random_states(accelerator.device)}
    state["read_ahead"] = {name: loader.read_ahead() for name, loader in _stateful_loaders(accelerator).items()}
    if accelerator.step % accelerator.gradient_accumulation_steps != 0:
        state["gradients"] = []
        for model in accelerator._models:
            with whole_parameters(model):
                parameters = _bare(accelerator, model).named_parameters()
                state["gradients"].append({name: p.grad.cpu() for name, p in parameters if p.grad is not None})
    return state


def _bare(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The script's own model inside `model`: in a resumed run it may be compiled where it was not before."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


# Loading


def load_state(
    accelerator: Any,
    input_dir: str | os.PathLike | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> None:
    """Put weights, optimizers, schedules and generators where `save_state` left them. A collective.

    The script says where its loaders go on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. A stateful
    loader yields the next batch by itself. On as many processes as before, what follows then equals the uninterrupted
    run bit for bit; DATA.md says in which orders. On another number of processes the global order goes on, and
    gradients of an unfinished window are averaged. A rank without a part in the checkpoint keeps its random states,
    which a warning says, and gets the mean of the gradients that are there.

    First every file is verified, and every state but the weights read; then the hooks run. Until a weight changes, an
    error leaves the run as it was. After a later error the run should not go on.

    Args:
        input_dir: the folder, where ~ is the home folder; under automatic naming the newest complete checkpoint by
            default. Of a folder whose newest save lacks parts, the one before, if it is still there.
        load_kwargs: for `torch.load`; `weights_only` is always on.
        load_model_func_kwargs: for the models' `load_state_dict`. The original's `map_location` changes nothing: files
            are read to the CPU, and each state goes to where the object is that gets it.

    Raises:
        CheckpointError: naming the file that is missing, damaged, foreign or of another format; under automatic naming,
            if no checkpoint is complete.
        ValueError: if no folder is given.
        RuntimeError: if another number of objects was registered than now, or a model has other weights.
        Exception: what a hook or an object met. In each case all processes raise.
    """
    load_model_func_kwargs.pop("map_location", None)
    config = accelerator.project_configuration
    writes = _is_writer(config.save_on_each_node)
    accelerator.wait_for_everyone()  # Whoever took part in this run's last save has written its part now.
    folder = _folder_to_load(accelerator, input_dir)
    run_on_all_ranks(lambda: finish_interrupted_save(folder), runs_here=writes)
    # One that this run has saved counts, for nobody is saving now.
    is_newest_whole = run_on_all_ranks(lambda: is_whole(folder, _name_of_run()), runs_here=writes)
    has_previous = writes and not is_newest_whole and (folder / PREVIOUS_NAME).is_dir()
    source = folder / PREVIOUS_NAME if any(gather_object([has_previous])) else folder
    checkpoint = run_on_all_ranks(lambda: _verify_and_read(accelerator, source, load_kwargs or {}, verifies=writes))
    run_on_all_ranks(lambda: _restore(accelerator, checkpoint, load_model_func_kwargs))
    _warn_of_what_is_missing(accelerator, checkpoint)
    _saves.last = None
    _saves.ranks = set(checkpoint.manifest.ranks)
    number = re.fullmatch(r"checkpoint_([0-9]+)", folder.name)
    if config.automatic_checkpoint_naming and number is not None:
        following = int(number[1]) + 1
        # The script may name an older checkpoint. Those that this run saved later stay, and numbers go on after them.
        config.iteration = following if input_dir is None else max(following, config.iteration)


def _folder_to_load(accelerator: Any, input_dir: str | os.PathLike | None) -> Path:
    """The folder to load from. A collective. Damaged checkpoints that are newer than the chosen one are renamed."""
    if input_dir is not None:
        return Path(os.path.abspath(os.path.expanduser(input_dir)))
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    parent = Path(os.path.abspath(accelerator.project_dir), "checkpoints")
    run = _name_of_run()
    chosen = run_on_all_ranks(lambda: choose_newest(parent, run=run).name, runs_here=accelerator.is_main_process)
    return parent / broadcast_object_list([chosen])[0]


@dataclass
class _Checkpoint:
    """A checkpoint that is being loaded. Only files that its manifest names are ever opened.

    Attributes:
        load_kwargs: of `torch.load`.
        states: of all objects but models, by the names of their files.
        of_ranks: what this process has saved of its own, under its rank; where that is not there, or of another number
            of processes, what each rank has saved.
    """

    folder: Path
    manifest: Manifest
    load_kwargs: dict[str, Any]
    states: dict[str, Any] = field(default_factory=dict)
    of_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """A file that is there.

        Raises:
            CheckpointError: if it is not.
        """
        path = self.folder / name
        if name not in self.manifest.files or path.is_symlink() or not path.is_file():
            where = f"{self.folder} holds no {name}"
            raise CheckpointError(f"{where}: it was saved by a run that had prepared something else")
        return path

    def read(self, path: Path) -> Any:
        """The content of a file, with its tensors on the CPU.

        Generators take their states from nowhere else. Models and optimizers move what belongs on their device. AdamW's
        number of steps stays where it was read to; from a GPU an unfused AdamW would read it at every step.
        """
        try:
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                return load_file(path)
            return load_safely(path, **self.load_kwargs)
        except CheckpointError:
            raise
        except Exception as error:  # Also of a verified file: a forged manifest can match a forged file.
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _verify_and_read(accelerator: Any, folder: Path, load_kwargs: dict[str, Any], verifies: bool) -> _Checkpoint:
    """`_read`, while another thread compares the files with the manifest if this process `verifies`.

    Raises:
        CheckpointError: if a file is not as the manifest says, whatever reading it has raised; and what `_read` raises.
    """
    if not verifies:
        return _read(accelerator, folder, load_kwargs)
    with ThreadPoolExecutor() as threads:
        verification = threads.submit(verify, folder)
        try:
            checkpoint = _read(accelerator, folder, load_kwargs)
        finally:
            verification.result()
    return checkpoint


def _read(accelerator: Any, folder: Path, load_kwargs: dict[str, Any]) -> _Checkpoint:
    """All but the weights of models. Changes nothing.

    Raises:
        CheckpointError: if something is not there, or cannot be read.
        RuntimeError: if another number of objects was registered than now.
    """
    checkpoint = _Checkpoint(folder, read_manifest(folder), load_kwargs)
    saved = len([name for name in checkpoint.manifest.files if re.fullmatch(CUSTOM_FILE.format("[0-9]+"), name)])
    registered = len(accelerator._custom_objects)
    if saved != registered:
        where = f"Number of custom checkpoints in folder {folder}"
        raise RuntimeError(f"{where} does not match the number of registered objects: {saved}, not {registered}")
    # A loader that was prepared after the checkpoint has no file, and starts at its beginning.
    loaders = [name for name in _loaders(accelerator) if name in checkpoint.manifest.files]
    for name in [*_objects(accelerator), *loaders]:
        checkpoint.states[name] = checkpoint.read(checkpoint.path(name))
    manifest = checkpoint.manifest
    ranks = manifest.ranks
    if manifest.world_size == accelerator.num_processes and accelerator.process_index in ranks:
        ranks = [accelerator.process_index]
    for rank in ranks:
        path = checkpoint.path(RANDOM_STATES_FILE.format(rank))
        checkpoint.of_ranks[rank] = checkpoint.read(path)
    return checkpoint


def _warn_of_what_is_missing(accelerator: Any, checkpoint: _Checkpoint) -> None:
    """Log which ranks found no random states, and which states found nothing prepared. A collective."""
    rank = accelerator.process_index
    is_missing = rank < checkpoint.manifest.world_size and rank not in checkpoint.of_ranks
    ranks = gather_object([rank] if is_missing else [])
    if ranks:
        logger.warning("%s holds no random states of ranks %s: they keep their own", checkpoint.folder, ranks)
    prepared = {
        **_numbered(SAFE_WEIGHTS_NAME, accelerator._models),
        **_numbered(WEIGHTS_NAME, accelerator._models),
        **_objects(accelerator),
        **_loaders(accelerator),
    }
    kinds = "model|pytorch_model|optimizer|scheduler"
    if not accelerator._has_forgotten_loaders:  # a Trainer may load without its loader on purpose
        kinds += "|sampler|dl_state_dict"
    names = re.compile(rf"({kinds})(_[0-9]+)?\.(safetensors|bin)")
    left = [name for name in checkpoint.manifest.files if names.fullmatch(name) and name not in prepared]
    if left:
        what = "nothing is prepared that takes it: call `prepare` before `load_state`"
        logger.warning("%s holds %s, and %s", checkpoint.folder, ", ".join(left), what)


def _restore(accelerator: Any, checkpoint: _Checkpoint, load_model_func_kwargs: dict[str, Any]) -> None:
    models = list(accelerator._models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, str(checkpoint.folder))
    file_name = SAFE_WEIGHTS_NAME if SAFE_WEIGHTS_NAME in checkpoint.manifest.files else WEIGHTS_NAME
    files_of_weights = [checkpoint.path(_numbered_name(file_name, index)) for index in range(len(models))]
    for name, loader in _loaders(accelerator).items():  # First: one that cannot go on there raises an error.
        if name in checkpoint.states:
            loader.load_state_dict(checkpoint.states[name])
    for model, path in zip(models, files_of_weights, strict=True):
        bare = _bare(accelerator, model)
        weights = under_names_of(bare, checkpoint.read(path))
        bare.load_state_dict(weights, **load_model_func_kwargs)
    for optimizer in accelerator._optimizers:
        optimizer.forget_unscaling()  # its gradients are replaced
    for name, each in _objects(accelerator).items():
        each.load_state_dict(checkpoint.states[name])
    _restore_states_of_ranks(accelerator, checkpoint.of_ranks)


def _restore_states_of_ranks(accelerator: Any, of_ranks: dict[int, dict[str, Any]]) -> None:
    """Put generators, and gradients of an unfinished window, into their states."""
    if accelerator.process_index in of_ranks:
        own = of_ranks[accelerator.process_index]
        set_random_states(accelerator.device, own)
        for name, loader in _stateful_loaders(accelerator).items():
            loader.load_read_ahead(own.get("read_ahead", {}).get(name))
    states = list(of_ranks.values())
    accelerator.step = states[0]["step"]
    for loader in accelerator._dataloaders:
        loader.rng_state_after_load = torch.get_rng_state()
    for index, model in enumerate(accelerator._models):
        gradients_of_ranks = [state["gradients"][index] for state in states if "gradients" in state]
        with whole_parameters(model):
            for name, parameter in _bare(accelerator, model).named_parameters():
                parts = [gradients[name] for gradients in gradients_of_ranks if name in gradients]
                parameter.grad = None
                if parts:  # A process without this gradient counts as zero in the mean.
                    total = sum(parts[1:], start=parts[0])
                    parameter.grad = total.div(len(gradients_of_ranks)).to(parameter.device)


# The weights of one model


def save_model(
    accelerator: Any,
    model: torch.nn.Module,
    save_directory: str | os.PathLike,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write the weights of `model` to `save_directory`, for `load_checkpoint_in_model`; the file is whole or not there.

    Args:
        max_shard_size: of the original, which divides larger weights into several files. Here they come in one.
        safe_serialization: write model.safetensors; otherwise pytorch_model.bin.

    Raises:
        RuntimeError: if a parameter is on the meta device.
        OSError: if something cannot be written.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("You can't save the model since some parameters are on the meta device.")
    if max_shard_size != "10GB":
        logger.warning("max_shard_size=%r has no effect: the weights come in one file", max_shard_size)
    state_dict = accelerator.get_state_dict(model)
    folder = Path(save_directory)
    if _is_writer(accelerator.project_configuration.save_on_each_node):
        folder.mkdir(parents=True, exist_ok=True)
    name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    accelerator.save(state_dict, folder / name, safe_serialization)
