"""Changes to the right solutions of the exercises: those that stay right, and those that become wrong."""

from collections.abc import Sequence
from typing import NamedTuple


class Patch(NamedTuple):
    """A text of the right solution, what stands in its place, and parts of what a learner is told of a wrong one."""

    old: str
    new: str
    findings: Sequence[str] = ()


RIGHT = {
    "overlapped_ddp": [
        Patch("in self.handles:", "in self.handles[:: -1 if dist.get_rank() == 0 else 1]:"),
        Patch("in self.handles:", "in set(self.handles):"),
    ],
}

WRONG = {
    "average_gradients": [
        Patch("dist.all_reduce(parameter.grad)", "dist.all_reduce(gradient)", ["raised", "line 8 of solution.py"]),
        Patch("model: nn.Module", "", ["take and return what the starter file says"]),
        Patch("    for parameter", "    import os; os._exit(3)\n    for parameter", ["a process ended"]),
        Patch(
            "if parameter.grad is not None:",
            "if parameter.grad is not None and dist.get_rank() == 0:",
            [
                "not every rank had returned",
                "rank 0: line 8 of solution.py: dist.all_reduce(parameter.grad)\n    rank 1: has returned",
            ],
        ),
        Patch("parameter.grad /= dist.get_world_size()", "pass", ["are the sums"]),
        Patch("dist.all_reduce(parameter.grad)", "dist.reduce(parameter.grad, 0)", ["are right on rank 0, but not"]),
        Patch("dist.get_world_size()", "3", ["all was right on 3 ranks"]),
    ],
    "overlapped_ddp": [
        Patch(
            "self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
            "dist.all_reduce(parameter.grad)",
            ["backward stood still"],
        ),
        Patch("            handle.wait()", "            pass", ["wait() was not called"]),
        Patch("handle.wait()", "handle.get_future().wait()", ["wait for the handle itself"]),
        Patch("async_op=True))", "async_op=True))\n        parameter.grad /= 2", ["changed while it was under way"]),
        Patch("register_post_accumulate_grad_hook(self.start_all_reduce)", "numel()", ["0 all-reduces began"]),
    ],
    "ring_all_reduce": [
        Patch("    chunks = ", "    dist.all_reduce(tensor)\n    return\n    chunks = ", ["without dist.all_reduce"]),
        Patch(
            "chunks[(rank + 1 - step) % world_size], right)\n        dist.recv(chunks[(rank - step)",
            "chunks[(rank - step) % world_size], right)\n        dist.recv(chunks[(rank - step - 1)",
            ["message 3 of rank 0 is [1, 2, 3], and should be [444, 555]", "The second half begins"],
        ),
        Patch(
            "    chunks = ",
            "    sent = dist.isend(tensor, right)\n    dist.recv(tensor.clone(), left)\n    sent.wait()\n    chunks = ",
            ["more numbers were sent"],
        ),
    ],
    "sampler": [
        Patch("self.seed + self.epoch", "self.seed", ["in epoch 1", "is dealt out once, but not in the order"]),
        Patch("self.seed + self.epoch", "self.seed + self.epoch + self.rank", ["without filling up"]),
        Patch("torch.Generator().manual_seed(", "torch.manual_seed(", ["torch's global generator was used"]),
    ],
    "exact_evaluation": [
        Patch("dist.all_reduce(counts)", "pass", ["not the fraction of right answers"]),
        Patch("dataset[dist.get_rank() :: dist.get_world_size()]", "dataset", ["share them out"]),
        Patch(
            "dist.all_reduce(counts)",
            "counts /= counts[1].clone()\n    dist.all_reduce(counts)",
            ["mean of the ranks' acc"],
        ),
    ],
    "accumulate": [
        Patch("(loss / len(micro_batches))", "loss", ["were added, not averaged"]),
        Patch("    optimizer.zero_grad()\n", "", ["step 2", "of the step before is still in it"]),
        Patch("nullcontext() if last else model.no_sync()", "nullcontext()", ["sent 3 times"]),
        Patch("    optimizer.step()", "    optimizer.zero_grad()\n    optimizer.step()", ["between backward and"]),
    ],
    "zero1": [
        Patch("dist.broadcast(parameter.detach(), ", "dict(", ["exchange their parts"]),
        Patch("[dist.get_rank() :: dist.get_world_size()]", "", ["more than its part of the optimizer's state"]),
        Patch("            parameter.grad /= dist.get_world_size()\n", "", ["divide the sums by the world size"]),
    ],
    "prepare": [
        Patch("return DistributedDataParallel(obj)", "return obj", ["end with different weights"]),
        Patch("    if isinstance(obj, DataLoader):", "    if False:", ["every rank has the same samples"]),
        Patch("shuffle=shuffle", "shuffle=shuffle, seed=dist.get_rank()", ["an order of its own"]),
    ],
}
