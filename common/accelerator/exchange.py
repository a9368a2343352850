"""Bytes of all ranks, for the collectives of `operations.py`; the ranks first compare what they are about to send.

`operations.py` takes nested structures apart, describes their leaves by `describe`, and calls one of these:

    compare(description)                  before a collective of torch: in `broadcast` and `reduce`
    exchange(description, content)        the content of each rank, of any length: pickled objects
    exchange_each(description, contents)  several contents, of which each has one length on all ranks: tensors

A rank that enters a collective of torch with another shape or dtype than the others would not get an error: gloo aborts
a process that receives more bytes than it expects. So each rank describes what it sends in lines of text, and first of
all the ranks exchange messages of one fixed size, which gloo can always receive. An example: a message has room for
four bytes of content, rank 0 has the content `abc`, and rank 1 has `de`.

    _first_message     rank 0 packs  | checksum of its description | 3 | abc. |    the dot is a zero that fills up
                       rank 1 packs  | checksum of its description | 2 | de.. |
    all_gather_bytes   both ranks have both messages
    exchange           the checksums are equal; else the ranks gather the descriptions, and raise the same error
                       the longest content has 3 bytes, so all of them are there: `abc` and `de.`

If rank 0 has `abcdef`, its message says 6 and has no content. The ranks see that, and in a second round
`all_gather_bytes` sends `abcdef` and `de....`.

On nccl nothing is compared, because the CPU would have to wait for the GPU's kernels. Ranks that send different shapes
there hang until the time-out, or get wrong numbers.
"""

import textwrap
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.nested import NamedLeaf
from common.process_group import all_gather_object

from .state import PartialState

HEADER_BYTES = 2 * torch.int64.itemsize
# The results of most batches fit into a message with so much room for them.
ROOM_FOR_CONTENT = 2**14 - HEADER_BYTES
MAX_CHARACTERS_PER_RANK = 500


class DistributedOperationException(RuntimeError):
    """The processes enter a collective with other keys, numbers, shapes or dtypes; raised on all of them."""


def compare(description: list[str]) -> None:
    """Check that all ranks have the same `description`, by an `exchange` without content.

    Raises:
        DistributedOperationException: on all ranks, if the descriptions differ; not on nccl.
    """
    exchange(description, torch.empty(0, dtype=torch.uint8, device="cpu"))


def exchange(description: list[str], content: torch.Tensor) -> torch.Tensor:
    """A row of bytes for each rank: its `content`, and zeros up to the length of the longest one.

    All ranks must have the same `description`, whose first line is the name of a collective. Unlike in `exchange_each`,
    the lengths of `content` may differ between the ranks; on nccl, where no lengths are sent, they may not.

    Raises:
        DistributedOperationException: as `compare`.
    """
    if PartialState().backend == "nccl":
        return all_gather_bytes(content)
    checksum = zlib.crc32("\n".join(description).encode())  # Python's `hash` of a text differs between processes.
    # A header, and `content` if there is room for it. This message is equally long on all ranks.
    header = torch.tensor([checksum, len(content)], device="cpu")  # whatever torch's default device is
    fitting = content if len(content) <= ROOM_FOR_CONTENT else content[:0]
    messages = all_gather_bytes(torch.cat([header.view(torch.uint8), _filled_up(fitting, ROOM_FOR_CONTENT)]))
    headers = messages[:, :HEADER_BYTES].contiguous().view(torch.int64)
    checksums, lengths = headers.T.tolist()
    if any(checksum_of_rank != checksum for checksum_of_rank in checksums):
        raise DistributedOperationException(_differences(all_gather_object(description)))
    longest = max(lengths)
    if longest <= ROOM_FOR_CONTENT:
        return messages.narrow(1, HEADER_BYTES, longest)
    return all_gather_bytes(_filled_up(content, longest))


def _filled_up(content: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(content, (0, length - len(content)))


def exchange_each(description: list[str], contents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each of `contents` a row of bytes for each rank. Each content has the same length on all ranks.

    If all contents fit into the first message, one exchange sends them. Otherwise the ranks compare first, and each
    content is then gathered without being copied.
    """
    lengths = [len(content) for content in contents]
    if not contents or sum(lengths) > ROOM_FOR_CONTENT:  # `torch.cat` would refuse an empty list.
        compare(description)
        return [all_gather_bytes(content) for content in contents]
    device = _device_of_messages()
    joined = exchange(description, torch.cat([content.to(device) for content in contents]))
    # The rows are cloned, because a dtype can be viewed only at a multiple of its size, and a content begins anywhere.
    return [rows.clone(memory_format=torch.contiguous_format) for rows in joined.split(lengths, dim=1)]


def all_gather_bytes(content: torch.Tensor) -> torch.Tensor:
    """A row of bytes for each rank. All ranks must have equally many. Where they have none, nothing is sent."""
    num_ranks = PartialState().num_processes
    content = content.to(_device_of_messages())
    rows = content.new_empty(num_ranks, len(content))
    if len(content) > 0:
        # torch 2.14 warns of the second name, and 2.11 does not have the first.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(rows.view(-1), content)
    return rows


def broadcast_bytes(content: bytes | None, from_process: int) -> bytes:
    """The `content` of rank `from_process`, of any length; the other ranks give None."""
    device = _device_of_messages()
    length = torch.tensor([0 if content is None else len(content)], device=device)
    dist.broadcast(length, from_process)
    if content is not None:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device), from_process)
        return content
    message = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(message, from_process)
    return message.cpu().numpy().tobytes()


def _device_of_messages() -> torch.device:
    state = PartialState()
    return state.device if state.backend == "nccl" else torch.device("cpu")


def shape_and_dtype(leaf: Any) -> str:
    """The text "[3, 2] torch.float32" for a tensor, and the name of its class for another leaf."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    if leaf.is_nested:  # torch gives it no shape, or one with numbers that only this process knows.
        return f"nested {leaf.layout} {leaf.dtype}"
    layout = "" if leaf.layout == torch.strided else f"{leaf.layout} "
    return f"{list(leaf.shape)} {layout}{leaf.dtype}"


def describe(collective: str, named: list[NamedLeaf], show: Callable[[Any], str] = shape_and_dtype) -> list[str]:
    """A line for the collective, and one for each leaf: its name and `show(leaf)`, which all ranks must have alike."""
    description = [collective]
    for name, leaf in named:
        description.append(f"{name or 'tensor'} {show(leaf)}")
    return description


def _differences(descriptions: list[list[str]]) -> str:
    """An error message with each rank's lines that are not in the descriptions of all ranks, shortened."""
    in_all = set(descriptions[0]).intersection(*descriptions)
    message = [f"the processes enter `{descriptions[0][0]}` with different keys, shapes or dtypes:"]
    for rank, description in enumerate(descriptions):
        own = "; ".join(line for line in description if line not in in_all) or "nothing else"
        message.append(f"  - rank {rank}: {textwrap.shorten(own, MAX_CHARACTERS_PER_RANK)}")
    message.append(
        "Fill tensors up to one shape with `pad_across_processes` first, or gather them as objects with "
        "`gather_for_metrics(..., use_gather_object=True)`."
    )
    return "\n".join(message)


def is_dense(leaf: Any) -> bool:
    """True for a strided tensor that is neither quantized nor nested."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.is_quantized:
        return False
    return leaf.layout == torch.strided


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in its memory if it is contiguous. gloo and nccl each lack some dtypes, but not bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A column of a single row counts as contiguous too, and `view(-1)` would keep its stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def from_bytes(content: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, each shaped as `like`, joined; `content` has a row of bytes for each rank."""
    rows = like.shape[0] if like.ndim else 1
    joined = content.flatten().view(like.dtype)
    return joined.view(rows * len(content), *like.shape[1:]).to(like.device)
