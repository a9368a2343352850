"""Checkpoints of an Accelerator: their content, and how a run goes on from one as if it had never stopped.

The files bear the names that Accelerate gives them. The second model is in model_1.safetensors, and so on.

    main part    model.safetensors or pytorch_model.bin    the weights of a model
                 optimizer.bin, scheduler.bin, scaler.pt   optimizers, schedulers, the scale of the loss under fp16
                 sampler.bin                               seed and epoch of a seedable sampler
                 dl_state_dict.bin                         the position of a stateful loader
                 custom_checkpoint_0.pkl                   an object of `register_for_checkpointing`
                 manifest.json                             the list of these files
    part of R    random_states_R.pkl                       the random generators of rank R, the batches that it has read
                                                           ahead, its gradients of an unfinished accumulation window
                 manifest_R.json                           the list of these files

The main process writes the main part, with its own random states in it. In `utils/`, checkpoint_folder.py says how a
save gets to its folder, checkpoint_manifest.py when a checkpoint is whole, save_history.py how ranks find the id of a
save, and serialization.py how files are kept free of code.
"""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .logging import get_logger
from .operations import broadcast_object_list, gather_object
from .sampler import SeedableRandomSampler, innermost_sampler
from .shard import DataLoaderShard, SeedableOrder, index_sampler_of
from .state import PartialState
from .utils.checkpoint_folder import PREVIOUS_NAME, Part, choose_newest, must_load_previous, remove_old_checkpoints
from .utils.checkpoint_manifest import CheckpointError, Manifest, read_manifest, verify
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


# Saving


def save_state(
    accelerator: Any,
    output_dir: str | os.PathLike | None = None,
    safe_serialization: bool = True,
    all_ranks: bool = False,
) -> Path:
    """Write everything that the run needs to go on, and return the folder. It waits for no other process.

    Each process that calls this writes its part, see the head of this file. Other files in the folder stay.

    The main process alone may call it. Then the other ranks' generators and gradients are not there, and a run that
    goes on from it is not exact.

    Args:
        output_dir: the folder, where ~ is the home folder; under automatic naming
            `project_dir/checkpoints/checkpoint_{iteration}` instead.
        safe_serialization: write model.safetensors; otherwise pytorch_model.bin.
        all_ranks: all processes call this, and wait for each other. Then the checkpoint appears with all its parts or
            not at all, and what one process meets is raised on all. (The original ignores this argument.)

    Raises:
        ValueError: without a folder; under automatic naming, if that checkpoint is there already.
        CheckpointError: if a state could not be loaded again, or the folder holds something that is in the way.
        Exception: what this process met (OSError, …). In each case what was there before is untouched. If old
            checkpoints cannot be removed, the new one is there.
    """
    config = accelerator.project_configuration
    folder = _folder_to_save(accelerator, output_dir)
    save_id = accelerator._save_history.next_id(folder)
    is_main = _writes_main_part(config.save_on_each_node)
    part = Part(folder, save_id, accelerator.process_index, accelerator.num_processes, is_main)
    weights_name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    save = _save_with_all_ranks if all_ranks else _save_own_part
    try:
        save(accelerator, part, weights_name)
    except BaseException:
        part.discard()
        raise
    return folder


def _save_own_part(accelerator: Any, part: Part, weights_name: str) -> None:
    """Write and publish the part of this process, and wait for no other."""
    config = accelerator.project_configuration
    history = accelerator._save_history
    ranks_of_last_save = history.expected_ranks(part.world_size)
    _stage(config, part)
    # Each rank collects all states, because a collective may put a state together. Only the main process writes them.
    weights = [accelerator.get_state_dict(model) for model in accelerator._models]
    _call_save_hooks(accelerator, weights, part.staging)
    states = _state_dicts(accelerator)
    rank_state = _rank_state(accelerator)
    _write(part, states | _numbered(weights_name, weights), rank_state)
    expected = part.publish(ranks_of_last_save)
    config.iteration += 1
    history.last_part = part
    if expected == {part.rank} and part.world_size > 1 and not config.save_on_each_node:
        others = "random states of the other ranks are only there once these call `save_state` too"
        logger.warning_once("the main process has saved alone: %s", others)
    _remove_old_checkpoints(config, part)


def _save_with_all_ranks(accelerator: Any, part: Part, weights_name: str) -> None:
    """Write and publish the parts of all processes: each step begins when all of them have done the one before."""
    config = accelerator.project_configuration
    part.save_id = broadcast_object_list([part.save_id])[0]  # a rank may have saved more often than the others
    run_on_all_ranks(lambda: _stage(config, part))
    weights = run_on_all_ranks(lambda: [accelerator.get_state_dict(model) for model in accelerator._models])
    run_on_all_ranks(lambda: _call_save_hooks(accelerator, weights, part.staging))
    states = run_on_all_ranks(lambda: _state_dicts(accelerator))
    rank_state = run_on_all_ranks(lambda: _rank_state(accelerator))
    run_on_all_ranks(lambda: _write(part, states | _numbered(weights_name, weights), rank_state))
    # The main part comes last: all parts are there when the checkpoint appears.
    run_on_all_ranks(lambda: part.publish(set()), runs_here=not part.is_main)
    run_on_all_ranks(lambda: part.publish(set()), runs_here=part.is_main)
    config.iteration += 1
    run_on_all_ranks(lambda: _remove_old_checkpoints(config, part))


def _writes_main_part(on_each_node: bool) -> bool:
    """True for the main process; with `on_each_node` for the first one of each machine."""
    state = PartialState()
    return state.is_local_main_process if on_each_node else state.is_main_process


def _folder_to_save(accelerator: Any, output_dir: str | os.PathLike | None) -> Path:
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        return Path(os.path.abspath(accelerator.project_dir), "checkpoints", f"checkpoint_{config.iteration}")
    if output_dir is None:
        raise ValueError("save_state needs a folder unless automatic_checkpoint_naming is on")
    return Path(os.path.abspath(os.path.expanduser(output_dir)))


def _stage(config: ProjectConfiguration, part: Part) -> None:
    if part.is_main and config.automatic_checkpoint_naming and os.path.lexists(part.folder):
        how = "`load_state` first, or set `project_configuration.iteration`"
        raise ValueError(f"Checkpoint directory {part.folder} ({config.iteration}) already exists: {how}")
    part.stage()


def _call_save_hooks(accelerator: Any, weights: list[dict[str, Any]], staging: Path) -> None:
    """Let the script's hooks change what is saved of the models, or write files of their own into `staging`."""
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, str(staging))


def _write(part: Part, main_contents: dict[str, Any], rank_state: dict[str, Any]) -> None:
    """Write the files of `part`, the contents of the main part only if it is that one."""
    contents = {RANDOM_STATES_FILE.format(part.rank): rank_state}
    if part.is_main:
        contents |= main_contents
    for name, content in contents.items():
        if name.endswith(".safetensors"):
            write_safetensors(content, part.staging / name)
        else:
            save_loadable(content, part.staging / name)


def _remove_old_checkpoints(config: ProjectConfiguration, part: Part) -> None:
    if part.is_main and config.automatic_checkpoint_naming and config.total_limit is not None:
        remove_old_checkpoints(part.folder, config.total_limit)


# The content of the files


def _state_dicts(accelerator: Any) -> dict[str, Any]:
    """The content of each file of the main part but those of the models and the main process's random states."""
    objects = _objects(accelerator) | _loaders(accelerator)
    states = {name: each.state_dict() for name, each in objects.items()}
    for name in _stateful_loaders(accelerator):
        del states[name]["read_ahead"]  # is another one on each rank, and in each rank's own file
    return states


def _objects(accelerator: Any) -> dict[str, Any]:
    """All objects with a `state_dict` but models and loaders, by the names of their files."""
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
        if loader.use_stateful_dataloader:
            found[_numbered_name(LOADER_FILE, index)] = loader
        elif isinstance(innermost_sampler(index_sampler_of(loader)), SeedableRandomSampler):
            found[_numbered_name(SAMPLER_FILE, index)] = SeedableOrder(loader)
    return found


def _stateful_loaders(accelerator: Any) -> dict[str, DataLoaderShard]:
    loaders = _loaders(accelerator).items()
    return {name: loader for name, loader in loaders if isinstance(loader, DataLoaderShard)}


def _numbered(file_name: str, objects: list[Any]) -> dict[str, Any]:
    return {_numbered_name(file_name, index): each for index, each in enumerate(objects)}


def _numbered_name(file_name: str, index: int) -> str:
    """The first is optimizer.bin, the second optimizer_1.bin."""
    return file_name.replace(".", f"_{index}.") if index else file_name


def _rank_state(accelerator: Any) -> dict[str, Any]:
    """The content of this rank's own file. It has gradients only in the middle of an accumulation window."""
    state = {"step": accelerator.step, **get_random_states(accelerator.device)}
    state["read_ahead"] = {
        name: loader.state_dict()["read_ahead"] for name, loader in _stateful_loaders(accelerator).items()
    }
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
        input_dir: the folder, where ~ is the home folder; under automatic naming the newest whole checkpoint by
            default. Of a folder whose newest save lacks parts, the one before, if it is still there.
        load_kwargs: for `torch.load`; `weights_only` is always on.
        load_model_func_kwargs: for the models' `load_state_dict`. The original's `map_location` changes nothing: files
            are read to the CPU, and each state goes to where the object is that gets it.

    Raises:
        CheckpointError: naming the file that is missing, damaged, foreign or of another format; under automatic naming,
            if none is whole.
        ValueError: if no folder is given.
        RuntimeError: if another number of objects was registered than now, or a model has other weights.
        Exception: what a hook or an object met. In each case all processes raise.
    """
    load_model_func_kwargs.pop("map_location", None)
    config = accelerator.project_configuration
    history = accelerator._save_history
    is_main = _writes_main_part(config.save_on_each_node)
    accelerator.wait_for_everyone()  # From here on no process is saving, so what this run has saved is finished.
    folder = _folder_to_load(accelerator, input_dir)
    loads_previous = run_on_all_ranks(lambda: must_load_previous(folder, history.name_of_run()), runs_here=is_main)
    source = folder
    if any(gather_object([bool(loads_previous)])):
        source = folder / PREVIOUS_NAME
    checkpoint = run_on_all_ranks(lambda: _verify_and_read(accelerator, source, load_kwargs or {}, verifies=is_main))
    run_on_all_ranks(lambda: _restore(accelerator, checkpoint, load_model_func_kwargs))
    _warn_of_what_is_missing(accelerator, checkpoint)
    history.last_part = None
    history.ranks = set(checkpoint.manifest.ranks)
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
    run = accelerator._save_history.name_of_run()
    is_main = accelerator.is_main_process
    chosen = run_on_all_ranks(lambda: choose_newest(parent, finished_run=run).name, runs_here=is_main)
    return parent / broadcast_object_list([chosen])[0]


@dataclass
class _Checkpoint:
    """A checkpoint that is being loaded. Only files that its manifest names are ever opened.

    Attributes:
        load_kwargs: of `torch.load`.
        states: of all objects but models, by the names of their files.
        rank_states: the states of `_rank_state` by rank. It is this rank's alone if the checkpoint has it and was saved
            by as many processes as there are now; else that of every rank.
    """

    folder: Path
    manifest: Manifest
    load_kwargs: dict[str, Any]
    states: dict[str, Any] = field(default_factory=dict)
    rank_states: dict[int, dict[str, Any]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """The path of a file that the checkpoint has; without it a CheckpointError is raised."""
        path = self.folder / name
        if name not in self.manifest.files or path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{name} is not among the files of the checkpoint in {self.folder}")
        return path

    def read(self, name: str) -> Any:
        """The content of a file that the checkpoint has, with its tensors on the CPU.

        Random generators accept their states from the CPU only. Models and optimizers move the other tensors to their
        device. AdamW's number of steps stays on the CPU, because an unfused AdamW reads it at every step.
        """
        path = self.path(name)
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
    """`_read`, while another thread verifies the files if this process `verifies`, whose error comes first."""
    if not verifies:
        return _read(accelerator, folder, load_kwargs)
    with ThreadPoolExecutor() as threads:
        verification = threads.submit(verify, folder)
        try:
            return _read(accelerator, folder, load_kwargs)
        finally:
            verification.result()


def _read(accelerator: Any, folder: Path, load_kwargs: dict[str, Any]) -> _Checkpoint:
    """Read everything but the weights of models, and change nothing in the run."""
    manifest = read_manifest(folder)
    ranks = manifest.ranks
    checkpoint = _Checkpoint(folder, manifest, load_kwargs)
    saved = len([name for name in manifest.files if re.fullmatch(CUSTOM_FILE.format("[0-9]+"), name)])
    registered = len(accelerator._custom_objects)
    if saved != registered:
        where = f"Number of custom checkpoints in folder {folder}"
        raise RuntimeError(f"{where} does not match the number of registered objects: {saved}, not {registered}")
    # A loader that was prepared after the checkpoint has no file, and starts at its beginning.
    loaders = [name for name in _loaders(accelerator) if name in manifest.files]
    for name in [*_objects(accelerator), *loaders]:
        checkpoint.states[name] = checkpoint.read(name)
    if manifest.world_size == accelerator.num_processes and accelerator.process_index in ranks:
        ranks = [accelerator.process_index]
    for rank in ranks:
        checkpoint.rank_states[rank] = checkpoint.read(RANDOM_STATES_FILE.format(rank))
    return checkpoint


def _warn_of_what_is_missing(accelerator: Any, checkpoint: _Checkpoint) -> None:
    """Log which ranks found no random states, and which states found nothing prepared. A collective."""
    rank = accelerator.process_index
    is_missing = rank < checkpoint.manifest.world_size and rank not in checkpoint.rank_states
    ranks = gather_object([rank] if is_missing else [])
    if ranks:
        logger.warning("%s holds no random states of ranks %s: they keep their own", checkpoint.folder, ranks)
    models = accelerator._models
    prepared = _objects(accelerator) | _loaders(accelerator)
    prepared |= _numbered(SAFE_WEIGHTS_NAME, models) | _numbered(WEIGHTS_NAME, models)
    kinds = "model|pytorch_model|optimizer|scheduler"
    if not accelerator._has_forgotten_loaders:  # else a loader is left out on purpose
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
    files_of_weights = list(_numbered(file_name, models))
    for name in files_of_weights:
        checkpoint.path(name)  # raises if it is not there
    for name, loader in _loaders(accelerator).items():  # first, because this may raise and changes no weight
        if name in checkpoint.states:
            loader.load_state_dict(checkpoint.states[name])
    for model, name in zip(models, files_of_weights, strict=True):
        bare = _bare(accelerator, model)
        weights = under_names_of(bare, checkpoint.read(name))
        bare.load_state_dict(weights, **load_model_func_kwargs)
    for optimizer in accelerator._optimizers:
        optimizer.forget_unscaling()  # its gradients are replaced
    for name, each in _objects(accelerator).items():
        each.load_state_dict(checkpoint.states[name])
    _restore_rank_states(accelerator, checkpoint.rank_states)


def _restore_rank_states(accelerator: Any, rank_states: dict[int, dict[str, Any]]) -> None:
    """Put generators, and gradients of an unfinished window, into their states."""
    if accelerator.process_index in rank_states:
        own = rank_states[accelerator.process_index]
        set_random_states(accelerator.device, own)
        for name, loader in _stateful_loaders(accelerator).items():
            loader.load_read_ahead(own.get("read_ahead", {}).get(name))
    states = list(rank_states.values())
    accelerator.step = states[0]["step"]
    for loader in accelerator._dataloaders:
        loader.mark_as_loaded()
    for index, model in enumerate(accelerator._models):
        gradients_of_ranks = [state["gradients"][index] for state in states if "gradients" in state]
        with whole_parameters(model):
            for name, parameter in _bare(accelerator, model).named_parameters():
                parts = [gradients[name] for gradients in gradients_of_ranks if name in gradients]
                parameter.grad = None
                if parts:  # in the mean, a rank without this gradient counts as zero
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
    if _writes_main_part(accelerator.project_configuration.save_on_each_node):
        folder.mkdir(parents=True, exist_ok=True)
    name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    accelerator.save(state_dict, folder / name, safe_serialization)


# Errors on several ranks


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
