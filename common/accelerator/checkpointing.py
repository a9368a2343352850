"""Checkpoints of an Accelerator: their content, and how a run goes on from one as if it had never stopped.

The files bear the names that Accelerate gives them. `utils/checkpoint_folder.py` makes them appear all at once,
`utils/serialization.py` lets them hold nothing that could execute code.
"""

import contextlib
import errno
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.files import discard_draft, sync_to_disk

from .operations import broadcast_object_list, gather_object
from .resume import SeedableOrder, StatefulDataLoaderShard
from .sampler import SeedableRandomSampler, innermost_sampler
from .shard import index_sampler_of
from .state import PartialState
from .utils.checkpoint_folder import (
    CheckpointError,
    CheckpointVersionError,
    Manifest,
    choose_newest,
    describe,
    finish_and_verify,
    finish_interrupted_save,
    holds_checkpoint,
    numbered,
    publish,
    read_manifest,
    remove_old_checkpoints,
    start_save,
    verifying,
    write_manifest,
)
from .utils.constants import SAFE_WEIGHTS_NAME, SCALER_NAME, WEIGHTS_NAME
from .utils.modeling import write_weights
from .utils.serialization import load_safely, save_loadable
from .utils.weights import under_names_of, view_key, write_safetensors

__all__ = [
    "CheckpointError",
    "CheckpointVersionError",
    "RemoteError",
    "choose_newest",
    "finish_and_verify",
    "load_state",
    "numbered",
    "run_on_all_ranks",
    "save_model",
    "save_state",
    "write_manifest",
]

OPTIMIZER_FILE = "optimizer.bin"
SCHEDULER_FILE = "scheduler.bin"
SAMPLER_FILE = "sampler.bin"
LOADER_FILE = "dl_state_dict.bin"
CUSTOM_FILE = "custom_checkpoint_{}.pkl"
RANDOM_STATES_FILE = "random_states_{}.pkl"

_LEAST_FREE_BYTES = 2**16


# All processes, and those that write


class RemoteError(RuntimeError):
    """Raised on a process that met no error itself, because another process met one; it quotes that error."""


def run_on_all_ranks(action: Callable[[], Any], runs_here: bool = True) -> Any:
    """Run `action` where `runs_here` is true, and return its result; if one process raises, all of them raise.

    A collective: all processes must call it. None is left waiting for one that failed.

    Raises:
        CheckpointError: on the other processes, if one raised a CheckpointError.
        RemoteError: on the other processes, quoting any other exception.
    """
    result = None
    error = None
    try:
        if runs_here:
            result = action()
    except Exception as failure:
        error = failure
    errors = gather_object([] if error is None else [_for_other_ranks(error)])
    if error is not None:
        raise error
    if errors:
        raise errors[0]
    return result


def _for_other_ranks(error: Exception) -> Exception:
    if isinstance(error, CheckpointError):
        return CheckpointError(str(error))
    return RemoteError(f"rank {PartialState().process_index}: {type(error).__name__}: {error}")


def _writing_rank(on_each_node: bool) -> int:
    """The process that writes for this one: the main process, or the first of this machine."""
    state = PartialState()
    return state.process_index - state.local_process_index if on_each_node else 0


def _is_writer(on_each_node: bool) -> bool:
    return PartialState().process_index == _writing_rank(on_each_node)


def _path_on_writer(path: Path, on_each_node: bool) -> Path:
    """The `path` of the process that writes for this one: machines may differ in their folders."""
    of_ranks = gather_object([str(path)])
    return Path(of_ranks[_writing_rank(on_each_node)])


# Saving


def save_state(
    accelerator: Any,
    output_dir: str | os.PathLike | None = None,
    safe_serialization: bool = True,
    **save_model_func_kwargs: Any,
) -> Path:
    """Write everything that the run needs to go on, and return the folder. A collective: all processes must call it.

    These are the models' weights (under the names that the script's models give them), optimizers, schedulers, seed and
    epoch of seedable samplers, positions of stateful loaders, the loss scale, registered objects, each rank's random
    generators and, in the middle of an accumulation window, each rank's gradients. The main process writes all of it;
    with `save_on_each_node`, one process of every machine does. Other files in the folder stay.

    Args:
        output_dir: the folder, where ~ is the home folder; under automatic naming
            `project_dir/checkpoints/checkpoint_{iteration}` instead.
        safe_serialization: write model.safetensors; otherwise pytorch_model.bin.
        save_model_func_kwargs: for the engines of the original that save their models themselves. They are out of
            scope, and without them the original ignores these arguments too.

    Raises:
        ValueError: without a folder; under automatic naming, if that checkpoint is there already.
        CheckpointError: if a state could not be loaded again, or the folder holds something that is in the way.
        Exception: what a process met (OSError, …); on the other processes a RuntimeError that quotes it. In each case,
            what was there before is untouched and no draft is left.
    """
    config = accelerator.project_configuration
    on_each_node = config.save_on_each_node
    writes = _is_writer(on_each_node)
    folder = _path_on_writer(_folder_to_save(accelerator, output_dir), on_each_node)

    def start() -> Path:
        if config.automatic_checkpoint_naming and (folder.is_symlink() or holds_checkpoint(folder)):
            how = "`load_state` first, or set `save_iteration`"
            raise ValueError(f"Checkpoint directory {folder} ({config.iteration}) already exists: {how}")
        return start_save(folder)

    own_draft = run_on_all_ranks(start, runs_here=writes)
    try:
        # Only a process that writes has a draft. The empty path of the others is not read.
        draft = _path_on_writer(own_draft or Path(), on_each_node)
        state = run_on_all_ranks(lambda: _collect(accelerator, draft))
        states_of_ranks = gather_object([state.of_rank])
        run_on_all_ranks(lambda: _write(state, states_of_ranks, draft, folder, safe_serialization), runs_here=writes)
    except BaseException:
        if own_draft is not None:
            discard_draft(own_draft)
        raise
    if config.automatic_checkpoint_naming and config.total_limit is not None:
        run_on_all_ranks(lambda: remove_old_checkpoints(folder, config.total_limit), runs_here=writes)
    config.iteration += 1
    return folder


def _folder_to_save(accelerator: Any, output_dir: str | os.PathLike | None) -> Path:
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        return Path(os.path.abspath(accelerator.project_dir), "checkpoints", f"checkpoint_{config.iteration}")
    if output_dir is None:
        raise ValueError("save_state needs a folder unless automatic_checkpoint_naming is on")
    return Path(os.path.abspath(os.path.expanduser(output_dir)))


class CollectedState(NamedTuple):
    """A process's contribution to a checkpoint.

    Attributes:
        weights: of each model.
        states: of all other objects, by the name of their file.
        of_rank: what belongs to this process alone: `_state_of_rank`.
    """

    weights: list[dict[str, torch.Tensor]]
    states: dict[str, Any]
    of_rank: dict[str, Any]


def _collect(accelerator: Any, draft: Path) -> CollectedState:
    """Ask everything for its state, on every process: a state may need a collective. Hooks may write files."""
    weights = [accelerator.get_state_dict(model) for model in accelerator._models]
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, str(draft))
    # The optimizers have the largest files. They come first, so that threads have time to flush them to the disk.
    objects = _optimizers(accelerator) + _other_objects(accelerator) + _loaders(accelerator)
    states = {each.file_name: each.object.state_dict() for each in objects}
    return CollectedState(weights, states, _state_of_rank(accelerator))


class ObjectWithState(NamedTuple):
    """Something with `state_dict` and `load_state_dict`, and the file for its state."""

    file_name: str
    object: Any


def _optimizers(accelerator: Any) -> list[ObjectWithState]:
    return _numbered_files(OPTIMIZER_FILE, accelerator._optimizers)


def _loaders(accelerator: Any) -> list[ObjectWithState]:
    """All loaders with a state: their position or, by default, seed and epoch of their seedable sampler.

    Their files are numbered as all loaders are, those without a state too.
    """
    found = []
    for index, loader in enumerate(accelerator._dataloaders):
        if isinstance(loader, StatefulDataLoaderShard):
            found.append(ObjectWithState(_numbered_name(LOADER_FILE, index), loader))
        elif isinstance(innermost_sampler(index_sampler_of(loader)), SeedableRandomSampler):
            found.append(ObjectWithState(_numbered_name(SAMPLER_FILE, index), SeedableOrder(loader)))
    return found


def _other_objects(accelerator: Any) -> list[ObjectWithState]:
    """All but models, optimizers and loaders."""
    scalers = [] if accelerator.scaler is None else [accelerator.scaler]
    custom = accelerator._custom_objects
    return [
        *_numbered_files(SCHEDULER_FILE, accelerator._schedulers),
        *_numbered_files(SCALER_NAME, scalers),
        *[ObjectWithState(CUSTOM_FILE.format(index), each) for index, each in enumerate(custom)],
    ]


def _numbered_files(file_name: str, objects: list[Any]) -> list[ObjectWithState]:
    return [ObjectWithState(_numbered_name(file_name, index), each) for index, each in enumerate(objects)]


def _numbered_name(file_name: str, index: int) -> str:
    """The first is optimizer.bin, the second optimizer_1.bin."""
    return file_name.replace(".", f"_{index}.") if index else file_name


def _weights_name(index: int, safe_serialization: bool) -> str:
    return _numbered_name(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, index)


def _state_of_rank(accelerator: Any) -> dict[str, Any]:
    """The states of this process's generators and, in the middle of a window, the gradients of each model so far."""
    state = {"step": accelerator.step, **get_random_states(accelerator.device)}
    if accelerator.step % accelerator.gradient_accumulation_steps != 0:
        state["gradients"] = [_gradients(_bare(accelerator, model)) for model in accelerator._models]
    return state


def get_random_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators that a script draws from without naming one, for `set_random_states`."""
    states = {"random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy_random_seed"] = sys.modules["numpy"].random.get_state()
    if device.type == "cuda":
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state(device)
    return states


def _bare(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The script's own model inside `model`: in a resumed run it may be compiled where it was not before."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def _write(
    state: CollectedState,
    states_of_ranks: list[dict[str, Any]],
    draft: Path,
    folder: Path,
    safe_serialization: bool,
) -> None:
    """Write all files into `draft`, and make it the checkpoint in `folder`.

    Threads flush each file to the disk and compute its checksum while the next one is being written.
    """
    contents = dict(state.states)
    for index, weights in enumerate(state.weights):
        contents[_weights_name(index, safe_serialization)] = weights
    for rank, of_rank in enumerate(states_of_ranks):
        contents[RANDOM_STATES_FILE.format(rank)] = of_rank
    descriptions = {}
    flushes = []
    try:
        with ThreadPoolExecutor() as threads:
            for name, content in contents.items():
                path = draft / name
                if path.suffix == ".safetensors":
                    write_safetensors(content, path)
                else:
                    save_loadable(content, path)
                flushes.append(threads.submit(sync_to_disk, path))
                descriptions[path] = threads.submit(describe, path)
            for flush in flushes:
                flush.result()
        write_manifest(draft, descriptions)
        publish(draft, folder)
    except Exception:
        # On a full disk torch.save says "unexpected pos 576 vs 534", which nobody can make sense of.
        if draft.exists() and shutil.disk_usage(draft).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
        raise


# Loading


def load_state(
    accelerator: Any,
    input_dir: str | os.PathLike | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> None:
    """Put weights, optimizers, schedules and generators where `save_state` left them. A collective.

    The script says where its loaders go on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. The next `for`
    over a stateful loader yields the next batch by itself, see `resume.py`. Either way, on as many processes as before,
    what follows equals the uninterrupted run bit for bit: explicitly in sequential and seedable orders, statefully in
    those of torch's samplers (except random draws inside loader workers and streams). On another number of processes
    the global order goes on and gradients of an unfinished window are averaged; ranks without a saved random state keep
    their own. Registered objects get the main process's state.

    If a file is missing or damaged, if the number of registered objects differs, or if a stateful loader cannot go on
    at its saved position, an error is raised before anything changes. After any other error a part of the state may
    have been loaded: the run should not go on.

    Args:
        input_dir: the folder, where ~ is the home folder; under automatic naming the newest complete checkpoint by
            default.
        load_kwargs: for `torch.load`; `weights_only` is always on.
        load_model_func_kwargs: for the models' `load_state_dict`; `map_location`, "cpu" or "on_device", is where the
            tensors of models are read to. All others are read to the CPU.

    Raises:
        CheckpointError: naming the file that is missing, damaged or foreign; under automatic naming, if no checkpoint
            is complete.
        CheckpointVersionError: if it was saved in another format.
        ValueError: if no folder is given.
        TypeError: for another `map_location`.
        RuntimeError: if another number of objects was registered than now, or a model has other weights.
        Exception: what a hook or an object met; on the other processes a RuntimeError that quotes it.
    """
    config = accelerator.project_configuration
    map_location = load_model_func_kwargs.pop("map_location", None)
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or `'on_device'`"
        )
    device_of_weights = accelerator.device if map_location == "on_device" else torch.device("cpu")
    folder = _choose_folder(accelerator, input_dir)
    # `_choose_folder` has verified the newest checkpoint already, on the main process.
    is_verified = input_dir is None and accelerator.is_main_process
    verifies = _is_writer(config.save_on_each_node) and not is_verified
    models = list(accelerator._models)

    def read() -> _Checkpoint:
        with verifying(folder) if verifies else contextlib.nullcontext():
            checkpoint = _Checkpoint(folder, read_manifest(folder), load_kwargs or {})
            checkpoint.read_states(accelerator)
        return checkpoint

    def restore() -> None:
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
        names_of_weights = [checkpoint.weights_name(index) for index in range(len(models))]
        checkpoint.check_holds(*names_of_weights)
        checkpoint.restore_states_of_loaders(accelerator)
        for model, name in zip(models, names_of_weights, strict=True):
            bare = _bare(accelerator, model)
            weights = checkpoint.read(name, device_of_weights)
            bare.load_state_dict(_fit_to_model(bare, weights), **load_model_func_kwargs)
        checkpoint.restore_other_states(accelerator)

    checkpoint = run_on_all_ranks(read)
    run_on_all_ranks(restore)
    number = re.fullmatch(r"checkpoint_([0-9]+)", folder.name)
    if config.automatic_checkpoint_naming and number is not None:
        config.iteration = int(number[1]) + 1


def _choose_folder(accelerator: Any, input_dir: str | os.PathLike | None) -> Path:
    """The folder to load from, on the process that writes for this one. A collective.

    A save to it that was interrupted is finished. Damaged checkpoints that are newer than the chosen one are renamed.
    """
    config = accelerator.project_configuration
    if input_dir is not None:
        folder = Path(os.path.abspath(os.path.expanduser(input_dir)))
    elif config.automatic_checkpoint_naming:
        parent = Path(os.path.abspath(accelerator.project_dir), "checkpoints")
        chosen = run_on_all_ranks(lambda: choose_newest(parent).name, runs_here=accelerator.is_main_process)
        folder = parent / broadcast_object_list([chosen])[0]
    else:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    folder = _path_on_writer(folder, config.save_on_each_node)
    run_on_all_ranks(lambda: finish_interrupted_save(folder), runs_here=_is_writer(config.save_on_each_node))
    return folder


@dataclass
class _Checkpoint:
    """A checkpoint that is being loaded. Only files that its manifest names are ever opened.

    Attributes:
        load_kwargs: of `torch.load`.
        states: of all objects but models, by the names of their files.
        of_ranks: what belonged to this process, under its rank; on another number of processes, to each that saved.
    """

    folder: Path
    manifest: Manifest
    load_kwargs: dict[str, Any]
    states: dict[str, Any] = field(default_factory=dict)
    of_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def check_holds(self, *names: str) -> None:
        """Raise a CheckpointError that names the first of `names` which is not there."""
        for name in names:
            if name not in self.manifest:
                raise CheckpointError(
                    f"{self.folder} holds no {name}: it was saved by a run that had prepared something else"
                )

    def read(self, name: str, device: torch.device) -> Any:
        """The content of a file, with its tensors on `device`."""
        self.check_holds(name)
        path = self.folder / name
        try:
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                return load_file(path, device=str(device))
            return load_safely(path, **(self.load_kwargs | {"map_location": device}))
        except CheckpointError:
            raise
        except Exception as error:  # Also of a verified file: a forged manifest can match a forged file.
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    def weights_name(self, index: int) -> str:
        """The file with the weights of model `index`."""
        safe_name = _weights_name(index, True)
        return safe_name if safe_name in self.manifest else _weights_name(index, False)

    def read_states(self, accelerator: Any) -> None:
        """Read all but the weights of models, and change nothing.

        Raises:
            CheckpointError: if something is not there, or cannot be read.
            RuntimeError: if another number of objects was registered than now.
        """
        saved = self._count(CUSTOM_FILE)
        registered = len(accelerator._custom_objects)
        if saved != registered:
            where = f"Number of custom checkpoints in folder {self.folder}"
            raise RuntimeError(f"{where} does not match the number of registered objects: {saved}, not {registered}")
        ranks = list(range(self._count(RANDOM_STATES_FILE)))
        if len(ranks) == accelerator.num_processes:
            ranks = [accelerator.process_index]
        # A loader that was prepared after the checkpoint has no file, and starts at its beginning.
        loaders = [each for each in _loaders(accelerator) if each.file_name in self.manifest]
        # To the CPU, the only place from which generators take their states. Of optimizers torch moves what belongs
        # beside the parameters. It leaves AdamW's number of steps where that was read to, and from a GPU an unfused
        # AdamW would read it at every step.
        cpu = torch.device("cpu")
        for each in _optimizers(accelerator) + _other_objects(accelerator) + loaders:
            self.states[each.file_name] = self.read(each.file_name, cpu)
        self.check_holds(RANDOM_STATES_FILE.format(0))
        self.of_ranks = {rank: self.read(RANDOM_STATES_FILE.format(rank), cpu) for rank in ranks}

    def _count(self, pattern: str) -> int:
        """The number of files that are numbered from 0 by `pattern`."""
        number = 0
        while pattern.format(number) in self.manifest:
            number += 1
        return number

    def restore_states_of_loaders(self, accelerator: Any) -> None:
        """Put the loaders where they were. They come first: a loader that cannot go on there raises an error."""
        for each in _loaders(accelerator):
            if each.file_name in self.states:
                each.object.load_state_dict(self.states[each.file_name])

    def restore_other_states(self, accelerator: Any) -> None:
        """Put optimizers, schedules, registered objects, generators and gradients into their states."""
        for optimizer in accelerator._optimizers:
            optimizer.forget_unscaling()  # its gradients are replaced
        for each in _optimizers(accelerator) + _other_objects(accelerator):
            each.object.load_state_dict(self.states[each.file_name])
        if accelerator.process_index in self.of_ranks:
            set_random_states(accelerator.device, self.of_ranks[accelerator.process_index])
        of_ranks = list(self.of_ranks.values())
        accelerator.step = of_ranks[0]["step"]
        for loader in accelerator._dataloaders:
            loader.rng_state_after_load = torch.get_rng_state()
        for index, model in enumerate(accelerator._models):
            gradients_of_ranks = [of_rank["gradients"][index] for of_rank in of_ranks if "gradients" in of_rank]
            for name, parameter in _bare(accelerator, model).named_parameters():
                parts = [gradients[name] for gradients in gradients_of_ranks if name in gradients]
                parameter.grad = _mean(parts, len(gradients_of_ranks), parameter.device)


def _fit_to_model(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`weights` under the names of `model`: without the prefixes of DDP and of `torch.compile`.

    Tied weights, saved once, get all their names.
    """
    own = model.state_dict()
    if own.keys() == weights.keys():
        # Returned unchanged: a new dict would lose the attribute `_metadata`, which holds the versions of the modules.
        return weights
    named = {}
    for name, tensor in weights.items():
        named[name if name in own else name.removeprefix("module.")] = tensor
    named = under_names_of(model, named)
    saved = {}
    for name in own.keys() & named.keys():
        saved[view_key(own[name], name)] = named[name]
    for name, tensor in own.items():
        key = view_key(tensor, name)
        if name not in named and key in saved:
            named[name] = saved[key]
    return named


def set_random_states(device: torch.device, states: dict[str, Any]) -> None:
    """Put the generators back into the states that `get_random_states` has read."""
    random.setstate(states["random_state"])
    torch.set_rng_state(states["torch_manual_seed"].cpu())
    if "numpy_random_seed" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy_random_seed"])
    if "torch_cuda_manual_seed" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["torch_cuda_manual_seed"].cpu(), device)


def _mean(parts: list[torch.Tensor], number: int, device: torch.device) -> torch.Tensor | None:
    """The sum of `parts`, divided by `number`: a process without a gradient counts as zero. None without parts."""
    if not parts:
        return None
    total = sum(parts[1:], start=parts[0])
    return total.div(number).to(device)


# The weights of one model


def save_model(
    accelerator: Any,
    model: torch.nn.Module,
    save_directory: str | os.PathLike,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write the weights of `model` to `save_directory`, for `load_checkpoint_in_model`: see `write_weights`.

    Args:
        max_shard_size: the most bytes in a file, or a text as "10GB"; only a single weight may be larger.
        safe_serialization: write model.safetensors; otherwise pytorch_model.bin.

    Raises:
        RuntimeError: if a parameter is on the meta device.
        ValueError: if `max_shard_size` is no size.
        OSError: if something cannot be written.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("You can't save the model since some parameters are on the meta device.")
    state_dict = accelerator.get_state_dict(model)
    if _is_writer(accelerator.project_configuration.save_on_each_node):
        write_weights(state_dict, Path(save_directory), max_shard_size, safe_serialization)
