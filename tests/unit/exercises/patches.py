"""Changes to the right solutions of the exercises: those that stay right, and those that become wrong.

A row is a text of the right solution and what stands in its place. Where it becomes wrong, the mistake's name follows,
and sometimes a fact that the learner is told.
"""

RIGHT = {
    "overlapped_ddp": [
        ("in self.handles:", "in self.handles[:: -1 if dist.get_rank() == 0 else 1]:"),
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
        ("def average_gradients", "def average", "no such name"),
        ("model: nn.Module", "", "wrong call"),
        ("    for parameter", "    import os; os._exit(3)\n    for parameter", "ended"),
        (
            "if parameter.grad is not None:",
            "if parameter.grad is not None and dist.get_rank() == 0:",
            "stuck",
            "rank 0: line 8 of solution.py: dist.all_reduce(parameter.grad)\n    rank 1: has returned",
        ),
        ("parameter.grad /= dist.get_world_size()", "pass", "sums"),
        ("dist.get_world_size()", "2", "fixed world size"),
        ("parameter.grad)", "parameter.grad, async_op=True)", "not waited for"),
        (
            "dist.all_reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()",
            """handle = dist.all_reduce(parameter.grad, async_op=True)
            parameter.grad /= dist.get_world_size()
            handle.wait()""",
            "changed on its way",
        ),
    ],
    "overlapped_ddp": [
        (
            "self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
            "dist.all_reduce(parameter.grad)",
            "backward waited",
        ),
        ("            handle.wait()", "            pass", "waited in another step"),
        ("register_post_accumulate_grad_hook(self.start_all_reduce)", "numel()", "not one message each"),
    ],
    "buckets": [
        ("reversed(parameters)", "parameters", "order"),
        ("parameter.nbytes", "parameter.numel()", "capacity"),
        ("parameter.grad.flatten()", "parameter.grad.float().flatten()", "rounded"),
    ],
    "ring_all_reduce": [
        ("    chunks = ", "    dist.all_reduce(tensor)\n    return\n    chunks = ", "a collective"),
        (
            "chunks[(rank + 1 - step) % world_size], right)\n        dist.recv(chunks[(rank - step)",
            "chunks[(rank - step) % world_size], right)\n        dist.recv(chunks[(rank - step - 1)",
            "all-gather",
            "message 3 of rank 0 is [1, 2], and should be [333, 444]",
        ),
        (
            "    chunks = tensor",
            """    travelling = tensor.clone()
    for _ in range(world_size - 1):
        handle = dist.isend(travelling.clone(), right)
        dist.recv(travelling, left)
        tensor += travelling
        handle.wait()
    return
    chunks = tensor""",
            "too much sent",
        ),
    ],
    "sampler": [
        ("self.seed + self.epoch", "self.seed", "other order", "in epoch 1"),
        ("self.seed + self.epoch", "self.seed + self.epoch + self.rank", "not once each", "common/eval_sampler.py"),
    ],
    "exact_evaluation": [
        ("dist.all_reduce(counts)", "pass", "other accuracy"),
        ("dataset[dist.get_rank() :: dist.get_world_size()]", "dataset", "not shared out"),
        (
            "dist.all_reduce(counts)\n    return (counts[0] / counts[1]).item()",
            "mean = counts[0] / counts[1]\n    dist.all_reduce(mean)\n    return mean.item() / dist.get_world_size()",
            "mean of means",
        ),
    ],
    "accumulate": [
        ("(loss / len(micro_batches))", "loss", "added"),
        ("    optimizer.zero_grad()\n", "", "not cleared", "step 2"),
        ("nullcontext() if last else model.no_sync()", "nullcontext()", "not sent once"),
    ],
    "zero1": [
        ("dist.broadcast(parameter.detach(), ", "dict(", "not exchanged"),
        ("[dist.get_rank() :: dist.get_world_size()]", "", "state not divided"),
        ("            parameter.grad /= dist.get_world_size()\n", "", "stepped with sums"),
    ],
    "loss_scaler": [
        ("return loss * self.factor", "return loss", "not scaled"),
        ("                parameter.grad /= self.factor\n", "", "not unscaled"),
        ("        dist.all_reduce(overflows)\n", "", "not skipped", "overflow on rank 1"),
    ],
    "prepare": [
        ("return DistributedDataParallel(obj)", "return obj", "no replicas"),
        ("    if isinstance(obj, DataLoader):", "    if False:", "same samples"),
        ("shuffle=shuffle", "shuffle=shuffle, seed=dist.get_rank()", "own orders"),
    ],
}
