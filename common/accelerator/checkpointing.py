"""Checkpoints that are whole or not there, that cannot execute code, and from which a run goes on as if never stopped.

A folder holds what Accelerate's would, under the same names, and a manifest with the size and SHA-256 of every file.
All files are written under a temporary name in that folder; renaming it to `.complete` is the one moment in which the
checkpoint comes to be. They are then moved to their places, which a load finishes if the save was interrupted.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import pickle
import random
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .operations import broadcast_object_list, gather_object
from .state import PartialState

logger = logging.getLogger(__name__)

MANIFEST, COMPLETE = "manifest.json", ".complete"
RANDOM_STATES, GRADIENTS = "random_states_{}.pkl", "gradients_{}.bin"


class CheckpointError(ValueError):
    """A checkpoint is not there, incomplete, damaged, or was not written by `save_state`."""


def save_state(accelerator, output_dir: str | os.PathLike | None = None, safe_serialization: bool = True) -> str:
    """Write everything that the run needs to go on, and return the folder. A collective: all processes must call it.

    Models (script's own names), optimizers, schedulers, loader positions, loss scale, registered objects, each rank's
    random generators and, in the middle of an accumulation window, its gradients. The main process writes it all;
    with `save_on_each_node`, one process of every machine. Other files in the folder stay.

    Args:
        output_dir: the folder; under automatic naming `project_dir/checkpoints/checkpoint_{iteration}` instead.
        safe_serialization: write model.safetensors; otherwise pytorch_model.bin.

    Raises:
        ValueError: without a folder; under automatic naming, if that checkpoint is there already.
        Exception: what a writing process met (OSError, …); on the other processes a RuntimeError that quotes it. What
            was there before is then untouched.
    """
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming:
        output_dir = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{config.iteration}")
    elif output_dir is None:
        raise ValueError("save_state needs a folder unless automatic_checkpoint_naming is on")
    folder = Path(os.path.abspath(output_dir))
    building = Path(broadcast_object_list([str(draft(folder)) if accelerator.is_main_process else ""])[0])

    def start() -> None:
        if config.automatic_checkpoint_naming and _contents(folder) is not None:
            raise ValueError(f"{folder} already exists: `load_state` first, or set `save_iteration`")
        _settle(folder)
        building.mkdir(parents=True)

    together(start, _writes(config.save_on_each_node))
    weights = [accelerator.get_state_dict(model) for model in accelerator._models]
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, str(building))
    ranks = gather_object([_rank_state(accelerator)])

    def write() -> None:
        try:
            for index, tensors in enumerate(weights):
                _dump(tensors, building / _model_name(index, safe_serialization), safe_serialization)
            for name, obj in _stateful(accelerator):
                torch.save(obj.state_dict(), building / name)
                if name.startswith("custom"):  # what could not be loaded safely is not saved either
                    torch.load(building / name, weights_only=True)
            for rank, states in enumerate(ranks):
                for name, state in states.items():
                    torch.save(state, building / name.format(rank))
            _seal(building)
            os.rename(building, folder / COMPLETE)
        except BaseException:
            full = shutil.disk_usage(building).free < 2**16
            shutil.rmtree(building, ignore_errors=True)
            if full:  # of which torch.save says "unexpected pos 576 vs 534"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
            raise
        _settle(folder)
        if config.automatic_checkpoint_naming and config.total_limit is not None:
            complete = [each for each in numbered(folder.parent) if (each / MANIFEST).exists()]
            for old in complete[config.total_limit :]:
                shutil.rmtree(old)

    together(write, _writes(config.save_on_each_node))
    config.iteration += 1
    return str(folder)


def draft(folder: Path) -> Path:
    """A name in `folder` for work in progress; what dead processes of this machine left under such names is dropped.

    What belongs to a living process, or to another machine, may be the work of another job and stays.
    """
    host, pid = socket.gethostname(), os.getpid()
    for left in folder.glob(f".*@*@{host}.tmp"):
        owner = int(left.name.split("@")[1])
        if owner == pid or not _is_alive(owner):
            shutil.rmtree(left, ignore_errors=True)
    return folder / f".{uuid.uuid4().hex}@{pid}@{host}.tmp"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _writes(on_each_node: bool) -> bool:
    state = PartialState()
    return state.is_local_main_process if on_each_node else state.is_main_process


def together(action: Callable[[], Any], here: bool = True) -> Any:
    """Run `action` where `here`; if it raises on some process, all of them raise and none is left waiting."""
    error = result = None
    try:
        result = action() if here else None
    except Exception as failure:
        error = failure
    said = f"rank {PartialState().process_index}: {type(error).__name__}: {error}"
    failures = gather_object([said] if error else [])
    if failures:
        raise error or RuntimeError("; ".join(failures))
    return result


def _stateful(accelerator) -> Iterator[tuple[str, Any]]:
    """What has a state of its own, by the name of its file."""
    scaler = [accelerator.scaler] if accelerator.scaler else []
    names = "optimizer.bin", "scheduler.bin", "dl_state_dict.bin", "scaler.pt"
    kinds = accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders, scaler
    for name, objects in zip(names, kinds, strict=True):
        yield from ((_indexed(name, index), obj) for index, obj in enumerate(objects))
    yield from ((f"custom_checkpoint_{index}.pkl", obj) for index, obj in enumerate(accelerator._custom_objects))


def _indexed(name: str, index: int) -> str:
    return name.replace(".", f"_{index}.") if index else name


def _model_name(index: int, safe_serialization: bool) -> str:
    return _indexed("model.safetensors" if safe_serialization else "pytorch_model.bin", index)


def _rank_state(accelerator) -> dict[str, Any]:
    """What only this process knows, by the name of its file."""
    states = {
        "step": accelerator.step,
        "loss_was_divided": accelerator._loss_was_divided,
        "random_state": random.getstate(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy_random_seed"] = [name, keys.tolist(), *rest]
    if accelerator.device.type == "cuda":
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state(accelerator.device)
    if accelerator.step % accelerator.gradient_accumulation_steps == 0:
        return {RANDOM_STATES: states}
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    gradients = [{n: p.grad.cpu() for n, p in m.named_parameters() if p.grad is not None} for m in models]
    return {RANDOM_STATES: states, GRADIENTS: gradients}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _seal(folder: Path) -> None:
    """Put every file of `folder` on the disk for good and its digest into the manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({str(path.relative_to(folder)): _digest(path) for path in paths}, indent=1))
    for path in (*paths, manifest, folder, folder.parent):
        _sync(path)


def _contents(folder: Path) -> dict[str, Any] | None:
    """The manifest in `folder`, or None if there is none.

    Raises:
        CheckpointError: if it cannot be read.
    """
    try:
        return dict(json.loads((folder / MANIFEST).read_text()))
    except FileNotFoundError:
        return _contents(folder / COMPLETE) if folder.name != COMPLETE else None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error


def _settle(folder: Path) -> None:
    """Move what a save completed to its place, in any state of doing so, and drop what the save before left."""
    complete = folder / COMPLETE
    if not (complete / MANIFEST).exists():  # the last to be moved
        shutil.rmtree(complete, ignore_errors=True)
        return
    contents = _contents(complete)
    for name in (_contents(folder) or {}).keys() - contents.keys():
        (folder / name).unlink(missing_ok=True)
    for name in (*contents, MANIFEST):
        if (complete / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(complete / name, folder / name)
    _sync(folder)
    shutil.rmtree(complete)


def verify(folder: Path) -> None:
    """Settle `folder`; raise a CheckpointError that names its first file that is not as the manifest says."""
    _settle(folder)
    contents = _contents(folder)
    if contents is None:
        raise CheckpointError(f"{folder} holds no {MANIFEST}: it is no checkpoint of save_state, or an unfinished one")
    for name, digest in contents.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing")
        if _digest(folder / name) != digest:
            raise CheckpointError(f"{folder / name} is not what was saved: it was cut short or changed")


def numbered(parent: Path, prefix: str = "checkpoint_") -> list[Path]:
    """The folders in `parent` whose names are `prefix` and a number, newest first."""
    found = [path for path in parent.glob(f"{prefix}*/") if re.fullmatch(rf"{prefix}\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True)


def holds_something(folder: Path) -> bool:
    """Whether more is in `folder` than the draft of a save that never ended."""
    return any(path.suffix != ".tmp" for path in folder.iterdir())


def newest(parent: Path, prefix: str = "checkpoint_") -> Path:
    """The newest of the `numbered` checkpoints that is whole. Newer ones are named, and renamed.

    Raises:
        CheckpointError: if none is whole; then all stay as they are.
    """
    damaged = []
    for folder in numbered(parent, prefix):
        try:
            verify(folder)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
            damaged += [folder] if holds_something(folder) else []
            continue
        logger.info("resuming from %s", folder)
        for other in damaged:  # the run will come to their numbers again
            with contextlib.suppress(OSError):
                other.rename(f"{other}.damaged-{uuid.uuid4().hex[:8]}")
        return folder
    raise CheckpointError(f"there is no complete checkpoint in {parent}")


def load_state(accelerator, input_dir=None, load_kwargs: dict | None = None, **load_model_func_kwargs) -> None:
    """Put the run where `save_state` left it: the next `for` over a loader yields the next batch. A collective.

    On as many processes as before, what follows equals the uninterrupted run bit for bit (but for random draws inside
    loader workers and streams). On another number the global order goes on and gradients of an unfinished window are
    averaged; ranks without a saved random state keep their own. Registered objects get the main process's state.

    Args:
        input_dir: the folder; under automatic naming the newest complete checkpoint by default.
        load_kwargs: for `torch.load`; `weights_only` is always on.
        load_model_func_kwargs: for the models' `load_state_dict`; `map_location`, "cpu" or "on_device", is where
            tensors are read to.

    Raises:
        CheckpointError: naming the file that is missing, damaged or foreign; under automatic naming, if no checkpoint
            is complete.
        ValueError: if no folder is given.
        RuntimeError: if other objects were registered than are here now.
    """
    config, main = accelerator.project_configuration, accelerator.is_main_process
    if input_dir is None and not config.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")

    def choose() -> Path:
        if input_dir is None:
            return newest(Path(accelerator.project_dir, "checkpoints"))
        verify(Path(input_dir).expanduser())
        return Path(input_dir).expanduser()

    folder = broadcast_object_list([together(choose, main)])[0]
    together(lambda: verify(folder), _writes(config.save_on_each_node) and not main)
    models = list(accelerator._models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(models, str(folder))
    together(lambda: _read(accelerator, folder, models, load_kwargs or {}, load_model_func_kwargs))
    if config.automatic_checkpoint_naming and (number := re.fullmatch(r"checkpoint_(\d+)", folder.name)):
        config.iteration = int(number[1]) + 1


def _read(accelerator, folder: Path, models: list, load_kwargs: dict, model_kwargs: dict) -> None:
    where = accelerator.device if model_kwargs.pop("map_location", None) == "on_device" else "cpu"

    def load(name: str) -> Any:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} holds no {name}: it was saved by a run that had prepared something else")
        return _open(torch.load, folder / name, {"map_location": where} | load_kwargs | {"weights_only": True})

    saved, registered = len(list(folder.glob("custom_checkpoint_*.pkl"))), len(accelerator._custom_objects)
    if saved != registered:
        raise RuntimeError(f"{folder} holds {saved} registered objects, but {registered} are registered here")
    for index, model in enumerate(models):
        if (folder / _model_name(index, True)).exists():
            from safetensors.torch import load_file

            tensors = _open(load_file, folder / _model_name(index, True), {"device": str(where)})
        else:
            tensors = load(_model_name(index, False))
        model = accelerator.unwrap_model(model, keep_torch_compile=False)
        model.load_state_dict(_as_named_in(model, tensors), **model_kwargs)
    for name, obj in _stateful(accelerator):
        obj.load_state_dict(load(name))
    rank, ranks = accelerator.process_index, len(list(folder.glob(RANDOM_STATES.format("*"))))
    name = RANDOM_STATES.format(min(rank, ranks - 1))
    states = load(name)
    _open(lambda _: _restore_random(accelerator, states, rank < ranks), folder / name, {})
    gradients = [load(GRADIENTS.format(r)) for r in range(ranks) if (folder / GRADIENTS.format(r)).exists()]
    gradients = gradients if ranks != accelerator.num_processes else gradients[rank : rank + 1]
    for index, model in enumerate(accelerator._models):
        for name, parameter in accelerator.unwrap_model(model).named_parameters():
            parts = [of_rank[index][name] for of_rank in gradients if name in of_rank[index]]
            parameter.grad = sum(parts).div_(len(gradients)).to(parameter.device) if parts else None


def _open(reader: Callable, path: Path, how: dict) -> Any:
    """`reader(path)`: a forged file, for which the manifest vouches, is an error that names it."""
    try:
        return reader(path, **how)
    except pickle.UnpicklingError:  # says what it refused to execute
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _restore_random(accelerator, states: dict[str, Any], own: bool) -> None:
    accelerator.step, accelerator._loss_was_divided = states["step"], states["loss_was_divided"]
    if not own:
        return
    random.setstate(states["random_state"])
    torch.set_rng_state(states["torch_manual_seed"])
    if "numpy_random_seed" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(states["numpy_random_seed"]))
    if "torch_cuda_manual_seed" in states and accelerator.device.type == "cuda":
        torch.cuda.set_rng_state(states["torch_cuda_manual_seed"].cpu(), accelerator.device)


def _as_named_in(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` under the names of `model`: without DDP's prefix; tied weights, saved once, under all of theirs."""
    own = model.state_dict()
    named = {name if name in own else name.removeprefix("module."): value for name, value in tensors.items()}
    saved = {own[name].data_ptr(): value for name, value in named.items() if name in own}
    return named | {n: saved[t.data_ptr()] for n, t in own.items() if n not in named and t.data_ptr() in saved}


def _dump(obj: Any, path: Path, safe_serialization: bool) -> None:
    if not safe_serialization:
        torch.save(obj, path)
        return
    from safetensors.torch import save_file

    # Safetensors wants tied weights once, under the first of their names, and none to share memory with others.
    names = {(tensor.data_ptr() or name, tensor.shape): name for name, tensor in reversed(obj.items())}
    copies = {n: t.clone(memory_format=torch.contiguous_format) for n, t in obj.items() if n in names.values()}
    save_file(copies, path, metadata={"format": "pt"})


def save(accelerator, obj: Any, f: Any, safe_serialization: bool = False) -> None:
    """Write `obj` to `f` from the main process, or one process of every machine: whole or not at all.

    With `safe_serialization` a dict of tensors becomes a safetensors file; otherwise `torch.save` writes it.
    """
    if not _writes(accelerator.project_configuration.save_on_each_node):
        return
    if hasattr(f, "write"):
        torch.save(obj, f)
        return
    temporary = Path(f"{os.fspath(f)}.{uuid.uuid4().hex}.tmp")
    try:
        _dump(obj, temporary, safe_serialization)
        _sync(temporary)
        os.replace(temporary, f)
    finally:
        temporary.unlink(missing_ok=True)


def save_model(accelerator, model, save_directory, max_shard_size="10GB", safe_serialization=True) -> None:
    """Write the weights of `model` to model.safetensors (or pytorch_model.bin) in `save_directory`.

    Raises:
        NotImplementedError: for a model larger than `max_shard_size`, in bytes or like "10GB".
    """
    tensors = accelerator.get_state_dict(model)
    number, unit = re.fullmatch(r"(\d+)([KMG]?I?B)", f"{max_shard_size}B".upper().replace("BB", "B")).groups()
    limit = int(number) * (1024 if "I" in unit else 1000) ** "BKMG".index(unit[0])
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > limit:
        raise NotImplementedError(f"{size} bytes are more than max_shard_size: sharded files are out of scope")
    Path(save_directory).mkdir(parents=True, exist_ok=True)
    accelerator.save(tensors, Path(save_directory, _model_name(0, safe_serialization)), safe_serialization)
