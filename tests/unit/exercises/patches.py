"""Changes to the right solutions of the exercises: those that stay right, and those that become wrong.

A row is a text of the right solution and what stands in its place. Where it becomes wrong, texts follow that the
learner is told.
"""

RIGHT = {
    "overlapped_ddp": [
        ("in self.handles:", "in self.handles[:: -1 if dist.get_rank() == 0 else 1]:"),
        ("in self.handles:", "in set(self.handles):"),
        ("handle.wait()", "handle.is_completed() or handle.wait()"),
    ],
    "buckets": [
        ("parameter.grad.copy_(part.view_as(parameter))", "parameter.grad = part.view_as(parameter)"),
    ],
    "loss_scaler": [
        (
            """overflows += not parameter.grad.isfinite().all()
        dist.all_reduce(overflows)
        self.was_skipped = overflows.item() > 0""",
            """overflows += parameter.grad.sum()  # a nan may be sent
        dist.all_reduce(overflows)
        self.was_skipped = not overflows.isfinite().item()""",
        ),
    ],
}

WRONG = {
    "average_gradients": [
        ("dist.all_reduce(parameter.grad)", "dist.all_reduce(gradient)", "raised", "line 8 of solution.py"),
        ("model: nn.Module", "", "take and return what the starter file says"),
        ("    for parameter", "    import os; os._exit(3)\n    for parameter", "a process ended"),
        (
            "if parameter.grad is not None:",
            "if parameter.grad is not None and dist.get_rank() == 0:",
            "not every rank had returned",
            "rank 0: line 8 of solution.py: dist.all_reduce(parameter.grad)\n    rank 1: has returned",
        ),
        ("parameter.grad /= dist.get_world_size()", "pass", "are the sums"),
        ("dist.get_world_size()", "3", "all was right on 3 ranks"),
    ],
    "overlapped_ddp": [
        (
            "self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
            "dist.all_reduce(parameter.grad)",
            "backward stood still",
        ),
        ("            handle.wait()", "            pass", "wait() was not called"),
        ("async_op=True))", "async_op=True))\n        parameter.grad /= 2", "was changed while it was under way"),
        ("register_post_accumulate_grad_hook(self.start_all_reduce)", "numel()", "0 all-reduces began"),
    ],
    "buckets": [
        ("reversed(parameters)", "parameters", "go from the last parameter"),
        ("parameter.nbytes", "parameter.numel()", "close a bucket when"),
        ("parameter.grad.flatten()", "parameter.grad.float().flatten()", "are rounded"),
    ],
    "ring_all_reduce": [
        ("    chunks = ", "    dist.all_reduce(tensor)\n    return\n    chunks = ", "and without dist.all_reduce"),
        (
            "chunks[(rank + 1 - step) % world_size], right)\n        dist.recv(chunks[(rank - step)",
            "chunks[(rank - step) % world_size], right)\n        dist.recv(chunks[(rank - step - 1)",
            "message 3 of rank 0 is [1, 2, 3], and should be [444, 555]",
            "The second half begins",
        ),
        (
            "    chunks = ",
            "    sent = dist.isend(tensor, right)\n    dist.recv(tensor.clone(), left)\n    sent.wait()\n    chunks = ",
            "more numbers were sent",
        ),
    ],
    "sampler": [
        ("self.seed + self.epoch", "self.seed", "in epoch 1: each sample is dealt out once, but not in the order"),
        ("self.seed + self.epoch", "self.seed + self.epoch + self.rank", "without filling up"),
    ],
    "exact_evaluation": [
        ("dist.all_reduce(counts)", "pass", "not the fraction of right answers"),
        ("dataset[dist.get_rank() :: dist.get_world_size()]", "dataset", "share them out"),
        (
            "dist.all_reduce(counts)",
            "counts /= counts[1].clone()\n    dist.all_reduce(counts)",
            "mean of the ranks' acc",
        ),
    ],
    "accumulate": [
        ("(loss / len(micro_batches))", "loss", "were added, not averaged"),
        ("    optimizer.zero_grad()\n", "", "step 2", "of the step before is still in it"),
        ("nullcontext() if last else model.no_sync()", "nullcontext()", "sent 3 times"),
        ("    optimizer.step()", "    optimizer.zero_grad()\n    optimizer.step()", "between backward and the step"),
    ],
    "zero1": [
        ("dist.broadcast(parameter.detach(), ", "dict(", "exchange their parts"),
        ("[dist.get_rank() :: dist.get_world_size()]", "", "more than its part of the optimizer's state"),
        ("            parameter.grad /= dist.get_world_size()\n", "", "divide the sums by the world size"),
    ],
    "loss_scaler": [
        ("return loss * self.factor", "return loss", "scale(loss) has to return"),
        ("                parameter.grad /= self.factor\n", "", "still multiplied by the scale"),
        ("        dist.all_reduce(overflows)\n", "", "overflowed on rank 1"),
    ],
    "prepare": [
        ("return DistributedDataParallel(obj)", "return obj", "end with different weights"),
        ("    if isinstance(obj, DataLoader):", "    if False:", "every rank has the same samples"),
        ("shuffle=shuffle", "shuffle=shuffle, seed=dist.get_rank()", "an order of its own"),
    ],
}
