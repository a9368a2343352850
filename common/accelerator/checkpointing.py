"""Checkpoints of an Accelerator: their content, and how a run goes on from one as if it had never stopped.

The files bear the names that Accelerate gives them. The second model is in model_1.safetensors, and so on.

    main part   model.safetensors or pytorch_model.bin    the weights of a model
                optimizer.bin, scheduler.bin, scaler.pt   optimizers, schedulers, the scale of the loss under fp16
                sampler.bin                               what a loader knows, such as a sampler's seed
                dl_state_dict.bin                         the position of a stateful loader
                custom_checkpoint_0.pkl                   an object of `register_for_checkpointing`
                random_states_0.pkl                       as in a rank part, for the process that writes the main part
                manifest.json                             the list of these files
    rank part   random_states_R.pkl                       the random generators of rank R, its loaders' states, its
                                                          gradients of an unfinished accumulation window
                manifest_R.json                           the list of this file

The main process writes the main part, every other process a rank part. In `utils/`, checkpoint_folder.py shows how a
save of several processes becomes a checkpoint, checkpoint_manifest.py finds damage, checkpoint_history.py the newest
checkpoint, save_ids.py says which parts belong to one save, and serialization.py keeps files free of code.
"""

import os
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .logging import get_logger
from .loss_scaler import LossScaler
from .operations import broadcast_object_list, gather_object
from .optimizer import AcceleratedOptimizer
from .remote_errors import errors_on_all_ranks, result_of_main_process
from .scheduler import AcceleratedScheduler
from .shard import DataLoaderShard
from .state import AcceleratorState, GradientState, PartialState
from .utils import save_ids
from .utils.checkpoint_folder import (
    complete_draft,
    draft_of_this_rank,
    finish_or_warn,
    finish_save,
    publish_main_part,
    publish_rank_part,
    remove,
)
from .utils.checkpoint_history import numbered, recover_newest, remove_old_checkpoints
from .utils.checkpoint_manifest import Checkpoint, CheckpointError, read_checkpoint, verify
from .utils.constants import SAFE_WEIGHTS_NAME, SCALER_NAME, WEIGHTS_NAME
from .utils.dataclasses import ProjectConfiguration
from .utils.fsdp_utils import whole_parameters
from .utils.modeling import load_state_dict
from .utils.random import get_random_states, set_random_states
from .utils.serialization import load_safely, save_loadable
from .utils.unwrap import innermost_model
from .utils.weights import under_names_of, write_safetensors

logger = get_logger(__name__)

OPTIMIZER_FILE = "optimizer.bin"
SCHEDULER_FILE = "scheduler.bin"
SAMPLER_FILE = "sampler.bin"
LOADER_FILE = "dl_state_dict.bin"
CUSTOM_FILE = "custom_checkpoint_{}.pkl"
RANDOM_STATES_FILE = "random_states_{}.pkl"


@dataclass(frozen=True)
class RunState:
    """The objects that the Accelerator has prepared, or the script has registered, and settings of the run.

    Each list is in the order of the numbers in the names of the files.

    Attributes:
        project: where checkpoints are, and how many of them are kept.
        step: calls of `accumulate`.
        get_state_dict: returns the weights of a model; under FSDP a collective.
    """

    project: ProjectConfiguration
    models: list[torch.nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    loaders: list[Any]
    scaler: LossScaler | None
    custom_objects: list[Any]
    save_hooks: list[Callable]
    load_hooks: list[Callable]
    step: int
    get_state_dict: Callable[[torch.nn.Module], dict[str, Any]]

    @property
    def writes_main_part(self) -> bool:
        """True on the main process; with `save_on_each_node` on the first one of each machine."""
        state = PartialState()
        return state.is_local_main_process if self.project.save_on_each_node else state.is_main_process

    def objects_by_file(self) -> dict[str, Any]:
        """All objects with a `state_dict` but models and loaders, by the names of their files."""
        objects = _by_file(OPTIMIZER_FILE, self.optimizers) | _by_file(SCHEDULER_FILE, self.schedulers)
        if self.scaler is not None:
            objects[SCALER_NAME] = self.scaler
        return objects | {CUSTOM_FILE.format(index): each for index, each in enumerate(self.custom_objects)}

    def loaders_by_file(self) -> dict[str, Any]:
        """All loaders by the names that their files have. A loader without a state has no file."""
        loaders: dict[str, Any] = {}
        for index, loader in enumerate(self.loaders):
            if isinstance(loader, DataLoaderShard):  # A script may have marked a plain one as prepared.
                file_name = LOADER_FILE if loader.use_stateful_dataloader else SAMPLER_FILE
                loaders[_numbered_name(file_name, index)] = loader
        return loaders


def _by_file(file_name: str, objects: list[Any]) -> dict[str, Any]:
    return {_numbered_name(file_name, index): each for index, each in enumerate(objects)}


def _numbered_name(file_name: str, index: int) -> str:
    stem, ending = file_name.split(".")
    return f"{stem}_{index}.{ending}" if index else file_name


def save_state(
    run: RunState, output_dir: str | os.PathLike | None, safe_serialization: bool = True, all_ranks: bool = False
) -> Path:
    """Write everything that the run needs to go on, and return the folder. Other files in the folder stay.

    Each process that calls this writes its part, and by default waits for no other process. So the main process alone
    may call it. Under FSDP all processes have to gather weights and states, so `all_ranks` is always on.

    A rank has no part in the checkpoint if it did not call this, or failed or was killed before its part was complete.
    Then its generators and gradients are not there, and a run that goes on from the checkpoint is not exact. Gradients
    that a script adds up in `no_sync`, without `accumulate`, are not there either.

    Args:
        output_dir: the folder, where ~ is the home folder; under automatic naming
            `project_dir/checkpoints/checkpoint_{iteration}` instead.
        safe_serialization: write model.safetensors; otherwise pytorch_model.bin.
        all_ranks: all processes call this, and each stage begins when all of them have done the one before. So no
            checkpoint appears unless all ranks have written their parts, and what one process meets is raised on all.
            (The original ignores this argument.)

    Raises:
        ValueError: if there is no folder to save to, automatic naming leads to a checkpoint that is there already, or
            `safe_serialization` is on and a model has a state that is no tensor.
        CheckpointError: if a state could not be loaded again, or something is in the way of a file of the main part.
        OSError: if something cannot be written, or an old checkpoint cannot be removed.
        Exception: what a hook or an object met.
    """
    project = run.project
    all_ranks = all_ranks or AcceleratorState().is_fsdp2
    if all_ranks:
        # All take both from the main process, which may have saved alone before, and then has another number.
        project.iteration, save_id = broadcast_object_list([project.iteration, uuid.uuid4().hex])
        folder = _folder_to_save(project, output_dir)
    else:
        folder = _folder_to_save(project, output_dir)
        save_id = save_ids.next_id(folder, run.step % GradientState().num_steps)
    draft = draft_of_this_rank(folder)
    # With `all_ranks` a stage ends when all ranks have done it. Else this rank goes on, and waits for nobody.
    stage = errors_on_all_ranks if all_ranks else nullcontext
    try:
        with stage():
            _begin_draft(run, folder, draft)
        with stage():
            weights = _weights_by_file(run, draft, safe_serialization)
        with stage():
            for name, content in _contents_by_file(run, weights).items():
                write = write_safetensors if name.endswith(".safetensors") else save_loadable
                write(content, draft / name)
            complete_draft(draft, save_id, run.writes_main_part)
        # The table in checkpoint_folder.py shows what is on the disk before and after each of these two.
        with stage():
            if not run.writes_main_part:
                publish_rank_part(draft, folder, save_id)
        with stage():  # The main part comes last, because with it the checkpoint appears.
            if run.writes_main_part:
                publish_main_part(draft, folder)
    except BaseException:
        remove(draft)
        if PartialState().use_distributed and not all_ranks:
            project.iteration += 1  # Others may have saved under this number. Else it stays, as in the original.
        raise
    project.iteration += 1
    with stage():
        if run.writes_main_part and project.automatic_checkpoint_naming and project.total_limit is not None:
            remove_old_checkpoints(folder, project.total_limit)
    return folder


def _folder_to_save(project: ProjectConfiguration, output_dir: str | os.PathLike | None) -> Path:
    if project.automatic_checkpoint_naming:
        return _folder_of_all(project) / f"checkpoint_{project.iteration}"
    if output_dir is None:
        raise ValueError("save_state needs a folder unless automatic_checkpoint_naming is on")
    return _absolute(output_dir)


def _folder_of_all(project: ProjectConfiguration) -> Path:
    if project.project_dir is None:
        raise ValueError("automatic_checkpoint_naming needs a project_dir")
    return Path(os.path.abspath(project.project_dir), "checkpoints")


def _absolute(folder: str | os.PathLike) -> Path:
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _begin_draft(run: RunState, folder: Path, draft: Path) -> None:
    """Make an empty draft. Before, the main process ends an earlier save into `folder` that was interrupted."""
    if run.writes_main_part:
        if run.project.automatic_checkpoint_naming and os.path.lexists(folder):
            hint = "`load_state` first, or set `project_configuration.iteration`"
            raise ValueError(f"Checkpoint directory {folder} ({run.project.iteration}) already exists: {hint}")
        finish_save(folder)
    remove(draft)
    draft.mkdir(parents=True)


def _weights_by_file(run: RunState, draft: Path, safe_serialization: bool) -> dict[str, Any]:
    """The weights that the hooks leave to be saved. The hooks may write files of their own to `draft`."""
    weights = [run.get_state_dict(model) for model in run.models]
    for hook in run.save_hooks:
        hook(run.models, weights, str(draft))
    return _by_file(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, weights)


def _contents_by_file(run: RunState, weights: dict[str, Any]) -> dict[str, Any]:
    """The content of each file of the part that this process writes; `weights` are those of the models by file.

    As in the original, all objects are asked for their states after the hooks, which may have changed them. Each rank
    asks, because under FSDP, and perhaps in an object of the script, that is a collective.
    """
    states = {}
    for name, each in run.objects_by_file().items():
        if isinstance(each, AcceleratedOptimizer):
            states[name] = each.state_dict(is_needed=PartialState().is_local_main_process)
        else:
            states[name] = each.state_dict()
    loader_states = {name: loader.state_dict() for name, loader in run.loaders_by_file().items()}
    loader_states = {name: state for name, state in loader_states.items() if state}
    rank_state: dict[str, Any] = {"step": run.step, **get_random_states(PartialState().device)}
    # A script that calls no `accumulate` sets `sync_gradients` itself.
    if run.step % GradientState().num_steps > 0 or not GradientState().sync_gradients:
        rank_state["gradients"] = [_gradients(model) for model in run.models]
    if not run.writes_main_part:
        # The loaders of each rank have read ahead, to different batches, so each part keeps its own.
        rank_state["loaders"] = loader_states
    rank_file = {RANDOM_STATES_FILE.format(PartialState().process_index): rank_state}
    return weights | states | loader_states | rank_file if run.writes_main_part else rank_file


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of `model`, on the CPU, by the names of their parameters."""
    with whole_parameters(model):
        parameters = innermost_model(model).named_parameters()
        return {name: parameter.grad.cpu() for name, parameter in parameters if parameter.grad is not None}


def load_state(
    run: RunState,
    input_dir: str | os.PathLike | None = None,
    load_kwargs: dict[str, Any] | None = None,
    with_loaders: bool = True,
    **load_model_func_kwargs: Any,
) -> int:
    """Put weights, optimizers, schedules and generators where `save_state` left them, and return the saved `step`.

    A collective. The script says where its loaders go on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. A
    stateful loader yields the next batch by itself. On as many processes as before, what follows then equals the
    uninterrupted run bit for bit, on the CPU and on CUDA; DATA.md says in which orders. On another number of processes
    the global order goes on, and gradients of an unfinished window are averaged. A rank without a part in the
    checkpoint keeps its random states, which a warning says, and gets the mean of the gradients that are there.

    First every file is verified, and every state but the weights read. An error there leaves the run as it was. Then
    the hooks are called, and each object gets its state. After an error there the run should not go on.

    Args:
        input_dir: the folder, where ~ is the home folder; under automatic naming the newest complete checkpoint by
            default.
        load_kwargs: for `torch.load` of all but weights; `weights_only` is always on.
        with_loaders: give loaders their states too. Without, they stay as they are, and no state of theirs is missed.
        load_model_func_kwargs: for the models' `load_state_dict`; but the original's `map_location` changes nothing.

    Raises:
        CheckpointError: naming the file that is missing, damaged, foreign or of another format; under automatic naming,
            if no checkpoint is complete and undamaged.
        ValueError: if no folder is given.
        RuntimeError: if another number of objects was registered than now, or a model has other weights.
        Exception: what a hook or an object met. In each case all processes raise.
    """
    project = run.project
    load_model_func_kwargs.pop("map_location", None)
    if not with_loaders:
        run = replace(run, loaders=[])
    PartialState().wait_for_everyone()  # Now no process is saving, so what this run has saved is complete.
    # On each disk one process verifies the checkpoint for all that read it: the one that would write a main part there.
    # The main process need not verify the newest checkpoint again, because it has verified that to find it.
    if input_dir is None:
        if not project.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        parent = _folder_of_all(project)
        folder = parent / result_of_main_process(lambda: recover_newest(parent).name)
        verifies_here = run.writes_main_part and not PartialState().is_main_process
    else:
        folder = _absolute(input_dir)
        verifies_here = run.writes_main_part
    with errors_on_all_ranks():
        if verifies_here:
            finish_or_warn(folder)
    with errors_on_all_ranks():
        read = _read_and_verify if verifies_here else _read
        saved = read(run, folder, load_kwargs or {})
    with errors_on_all_ranks():
        _restore(run, saved, load_model_func_kwargs)
    with errors_on_all_ranks():  # Under FSDP this is a collective, so no rank may have failed before.
        _restore_gradients(run.models, saved.gradients)
    _warn_of_ranks_without_part(saved)
    _warn_of_files_without_object(run, saved, with_loaders)
    if project.automatic_checkpoint_naming and project.project_dir is not None:
        # The number after the highest on the main process's disk, but no lower than that process's own. So the newer
        # checkpoints stay if the script has gone back to an older one.
        iteration, folders = result_of_main_process(lambda: (project.iteration, numbered(_folder_of_all(project))))
        next_on_disk = int(folders[0].name.removeprefix("checkpoint_")) + 1 if folders else 0
        project.iteration = max(iteration, next_on_disk)
    return saved.step


@dataclass(frozen=True)
class SavedRun:
    """The content of a checkpoint, but for the weights. Only files that its manifests name are ever opened.

    Attributes:
        states: of all objects but models, by the names of their files.
        step: the calls of `accumulate` that the saved run had made, on each rank.
        rank_state: the content of this rank's random_states_R.pkl; empty if the checkpoint has none.
        gradients: with which this rank goes on in an unfinished window, of each model; empty if the window was whole.
    """

    checkpoint: Checkpoint
    states: dict[str, Any]
    step: int
    rank_state: dict[str, Any]
    gradients: list[dict[str, torch.Tensor]]

    @property
    def weights_name(self) -> str:
        return SAFE_WEIGHTS_NAME if SAFE_WEIGHTS_NAME in self.checkpoint.files else WEIGHTS_NAME

    def loader_state(self, name: str) -> dict[str, Any]:
        """The state that this rank's loader of this name had; that of rank 0 if there is no other."""
        of_rank_0 = self.states.get(name, {})
        own = self.rank_state.get("loaders", {}).get(name, of_rank_0)
        # With `even_batches=False` the last ranks end an epoch a step before rank 0, whose part says when it is over.
        epoch = {key: value for key, value in of_rank_0.items() if key in ("epoch", "is_over")}
        return own | epoch


def _read(run: RunState, folder: Path, load_kwargs: dict[str, Any]) -> SavedRun:
    """Read everything but the weights of models, and change nothing in the run."""
    checkpoint = read_checkpoint(folder)
    num_saved = len([name for name in checkpoint.files if re.fullmatch(CUSTOM_FILE.format("[0-9]+"), name)])
    if num_saved != len(run.custom_objects):
        raise RuntimeError(
            f"Number of custom checkpoints in folder {folder} does not match the number of registered objects:"
            f" {num_saved}, not {len(run.custom_objects)}"
        )
    names = list(run.objects_by_file())
    # A loader that was prepared after the checkpoint has no file, and starts at its beginning.
    names += [name for name in run.loaders_by_file() if name in checkpoint.files]
    states = {name: _read_file(checkpoint, name, **load_kwargs) for name in names}
    rank_states = _read_rank_states(checkpoint, load_kwargs)
    step = next(iter(rank_states.values()))["step"]  # All parts of a save have the same.
    gradients = [state["gradients"] for state in rank_states.values() if "gradients" in state]
    own_state = rank_states.get(PartialState().process_index, {})
    return SavedRun(checkpoint, states, step, own_state, _mean_gradients(gradients))


def _read_and_verify(run: RunState, folder: Path, load_kwargs: dict[str, Any]) -> SavedRun:
    """`_read`, while a thread verifies the folder. What it finds is raised, and not what reading meets."""
    with ThreadPoolExecutor() as threads:
        verification = threads.submit(verify, folder)
        try:
            return _read(run, folder, load_kwargs)
        finally:
            verification.result()


def _read_rank_states(checkpoint: Checkpoint, load_kwargs: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The states that this rank reads, by rank: its own.

    On another number of processes, or if this rank has no part, they are those of all ranks that have one.
    """
    ranks = [manifest.rank for manifest in checkpoint.manifests]
    own_rank = PartialState().process_index
    if checkpoint.world_size == PartialState().num_processes and own_rank in ranks:
        ranks = [own_rank]
    rank_states = {}
    for rank in ranks:
        name = RANDOM_STATES_FILE.format(rank)
        state = _read_file(checkpoint, name, **load_kwargs)
        # A forged file may hold anything.
        if not isinstance(state, dict) or not {"step", "random_state", "torch_manual_seed"} <= state.keys():
            raise CheckpointError(f"{checkpoint.folder}/{name} is not what a rank saves")
        rank_states[rank] = state
    return rank_states


def _mean_gradients(of_ranks: list[list[dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    """For each model the mean of the ranks' gradients. A rank without one of them counts as zero in it."""
    means = []
    for of_one_model in zip(*of_ranks, strict=True):
        total: dict[str, torch.Tensor] = {}
        for gradients in of_one_model:
            for name, gradient in gradients.items():
                total[name] = total[name] + gradient if name in total else gradient
        mean = {name: gradient / len(of_ranks) for name, gradient in total.items()}
        means.append(mean)
    return means


def _read_file(checkpoint: Checkpoint, name: str, **load_kwargs: Any) -> Any:
    """The content of a file that the checkpoint has, with its tensors on the CPU.

    Random generators accept their states from the CPU only. Models and optimizers move the other tensors to their
    device. AdamW's number of steps stays on the CPU, because an unfused AdamW reads it at every step.
    """
    path = checkpoint.require_file(name)
    try:
        if path.suffix == ".safetensors":
            return load_state_dict(path)
        return load_safely(path, **load_kwargs)
    except CheckpointError:
        raise
    except Exception as error:  # A verified file can be unreadable too: a forged manifest can match a forged file.
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _restore(run: RunState, saved: SavedRun, load_model_func_kwargs: dict[str, Any]) -> None:
    """Give every object its state. The steps that may raise and change no weight come first."""
    models = list(run.models)
    for hook in run.load_hooks:
        hook(models, str(saved.checkpoint.folder))
    models_by_file = _by_file(saved.weights_name, models)
    for name in models_by_file:
        saved.checkpoint.require_file(name)
    for name, loader in run.loaders_by_file().items():
        loader.load_state_dict(saved.loader_state(name))
    for name, model in models_by_file.items():
        bare = innermost_model(model)
        weights = under_names_of(bare, _read_file(saved.checkpoint, name))
        bare.load_state_dict(weights, **load_model_func_kwargs)
    for model in run.models:
        model.zero_grad()  # The scaler, which is among the next, then forgets which gradients it has unscaled.
    for name, each in run.objects_by_file().items():
        each.load_state_dict(saved.states[name])
    if saved.rank_state:
        set_random_states(PartialState().device, saved.rank_state)


def _restore_gradients(models: list[torch.nn.Module], gradients: list[dict[str, torch.Tensor]]) -> None:
    """Give parameters their gradients of an unfinished window, or none. Under FSDP a collective."""
    for index, model in enumerate(models):
        saved = gradients[index] if gradients else {}
        with whole_parameters(model):
            for name, parameter in innermost_model(model).named_parameters():
                parameter.grad = saved[name].to(parameter.device) if name in saved else None


def _warn_of_ranks_without_part(saved: SavedRun) -> None:
    """Log the ranks that keep their random states, because the checkpoint has none for them. A collective."""
    rank = PartialState().process_index
    is_missing = rank < saved.checkpoint.world_size and not saved.rank_state
    ranks = gather_object([rank] if is_missing else [])
    if ranks:
        logger.warning("%s holds no random states of ranks %s: they keep their own", saved.checkpoint.folder, ranks)


def _warn_of_files_without_object(run: RunState, saved: SavedRun, with_loaders: bool) -> None:
    kinds = [SAFE_WEIGHTS_NAME, WEIGHTS_NAME, OPTIMIZER_FILE, SCHEDULER_FILE]
    if with_loaders:
        kinds += [SAMPLER_FILE, LOADER_FILE]
    taken = saved.states | _by_file(saved.weights_name, run.models)
    not_taken = sorted(saved.checkpoint.files - taken.keys())
    left = [name for name in not_taken if re.sub(r"_[0-9]+\.", ".", name) in kinds]
    if left:
        hint = "nothing is prepared that takes it: call `prepare` before `load_state`"
        logger.warning("%s holds %s, and %s", saved.checkpoint.folder, ", ".join(left), hint)
