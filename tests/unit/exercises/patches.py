"""Changes to the right solutions of the exercises: those that stay right, and those that become wrong.

A row is a text of the right solution and what stands in its place. Where it becomes wrong, a part of the finding
follows: the fact, or the idea that is missing.
"""

RIGHT = {
    "average_gradients": [
        ("dist.all_reduce(parameter.grad)", "dist.all_reduce(parameter.grad, async_op=True).wait()"),
    ],
    "overlapped_ddp": [
        ("async_op=True)", "async_op=True).get_future().then(lambda future: future.value())"),
        ("in self.handles:", "in self.handles[:: -1 if dist.get_rank() == 0 else 1]:"),
    ],
    "buckets": [
        ("parameter.grad.copy_(part.view_as(parameter))", "parameter.grad = part.view_as(parameter)"),
    ],
    "ring_all_reduce": [
        ("dist.recv(arrived, left)", "dist.irecv(arrived, left).wait()"),
        (
            """        handle = dist.isend(chunks[(rank - step) % world_size], right)
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        mine += arrived
        handle.wait()
""",
            """        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        if rank > 0:
            dist.recv(arrived, left)
        dist.send(chunks[(rank - step) % world_size], right)
        if rank == 0:
            dist.recv(arrived, left)
        mine += arrived
""",
        ),
    ],
    "sampler": [
        ("return iter(order", "yield from (order"),
    ],
    "exact_evaluation": [
        (
            "own = dataset[dist.get_rank() :: dist.get_world_size()]",
            """rank, size = dist.get_rank(), len(dataset) // dist.get_world_size()
    own = dataset[rank * size : (rank + 1) * size if rank < dist.get_world_size() - 1 else None]""",
        ),
    ],
    "accumulate": [
        ("    for number,", "    optimizer.zero_grad()\n    for number,"),
        (
            """        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
""",
            """        with model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
    import torch.distributed as dist

    dist.all_reduce(model.module.weight.grad, op=dist.ReduceOp.AVG)
""",
        ),
    ],
    "zero1": [
        (
            """        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
""",
            """        for number, parameter in enumerate(self.parameters):
            dist.reduce(parameter.grad, dst=number % dist.get_world_size())
""",
        ),
        (
            "class ZeRO1:",
            """from common.small.zero import ZeRO1 as OfEqualParts


class ZeRO1(OfEqualParts):
    def __init__(self, module, **settings):
        super().__init__(module, torch.optim.AdamW, **settings)


class OfWholeParameters:""",
        ),
    ],
    "loss_scaler": [
        ("dist.all_reduce(overflows)", "dist.all_reduce(overflows, op=dist.ReduceOp.MAX)"),
    ],
    "prepare": [
        ("shuffle=shuffle", "num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=shuffle, seed=7"),
    ],
}

WRONG = {
    "average_gradients": [
        ("dist.all_reduce(parameter.grad)", "dist.all_reduce(gradient)", "raised NameError: name 'gradient'"),
        ("    for parameter", "    assert dist.get_rank() == 0, 'no'\n    for parameter", "no, on rank 1"),
        ("def average_gradients", "def average", "solution.py defines no average_gradients"),
        ("model: nn.Module", "", "Does it take, and return, what the starter file says?"),
        ("-> None:", "-> None", "raised SyntaxError"),
        ("    for parameter", "    import os; os._exit(3)\n    for parameter", "and not by an exception"),
        (
            "if parameter.grad is not None:",
            "if parameter.grad is not None and dist.get_rank() == 0:",
            "rank 0: line 8 of solution.py: dist.all_reduce(parameter.grad)\n    rank 1: has returned",
        ),
        (
            "    for parameter",
            "    while dist.get_rank() == 1: pass\n    for parameter",
            "rank 1: line 6 of solution.py: while dist.get_rank() == 1: pass",
        ),
        ("parameter.grad /= dist.get_world_size()", "pass", "they are the sums over the ranks: divide by"),
        ("dist.get_world_size()", "2", "on 3 ranks, after all was right on 2 (is there a 2 in your code"),
        ("dist.all_reduce(parameter.grad)", "continue", "they are each rank's own"),
        ("parameter.grad)", "parameter.grad.clone())", "they are each rank's own: all_reduce writes the sum into"),
        ("all_reduce(parameter.grad)", "reduce(parameter.grad, dst=0)", "divided once by the world size"),
        ("if parameter.grad is not None:", "if True:", "a parameter without a gradient has to be passed over"),
        (
            "        if parameter.grad is not None:",
            "        if parameter.grad is None:\n            parameter.grad = parameter.detach() * 0\n        if True:",
            "None stays None",
        ),
        ("parameter.grad)", "parameter.grad, async_op=True)", "rank 0 has not called wait() on these handles"),
        (
            "dist.all_reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()",
            """handle = dist.all_reduce(parameter.grad, async_op=True)
            parameter.grad /= dist.get_world_size()
            handle.wait()""",
            "were changed while their all_reduce was under way",
        ),
    ],
    "overlapped_ddp": [
        ("        parameter.grad /= dist.get_world_size()\n", "", "they are the sums over the ranks"),
        (
            "self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
            "dist.all_reduce(parameter.grad)",
            "so backward stood still",
        ),
        ("            handle.wait()", "            pass", "was not waited for before the optimizer's step"),
        ("        self.handles.clear()\n", "", "and then forget the handles"),
        ("register_post_accumulate_grad_hook(self.start_all_reduce)", "numel()", "0 all-reduces began, for the"),
        (
            "        for handle in self.handles:\n",
            "        for parameter in self.module.parameters():\n            self.start_all_reduce(parameter)\n"
            "        for handle in self.handles:\n",
            "6 all-reduces began, for the gradients of 3 layers",
        ),
        (
            "            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)\n",
            """        module.register_full_backward_hook(self.start_all)

    def start_all(self, *_):
        for parameter in self.module.parameters():
            self.start_all_reduce(parameter)
""",
            "NoneType",
        ),
    ],
    "buckets": [
        ("reversed(parameters)", "parameters", "from the last parameter, whose gradient backward computes first"),
        ("    if filling:\n        buckets.append(filling)\n", "", "the last bucket may be short"),
        ("parameter.nbytes", "parameter.numel()", "in bytes (parameter.nbytes)"),
        ("size >= capacity", "size > capacity", "at least the capacity (>=)"),
        ("            size = 0\n", "", "and count the next one from 0"),
        ("    return buckets", "    return None", "Does it take, and return, what the starter file says?"),
        ("parameter.grad.flatten()", "parameter.grad.float().flatten()", "they are rounded: give your own tensors the"),
        ("    for parameter in bucket:", "    for parameter in reversed(bucket):", "in which they were packed"),
        (
            "    message = torch.cat",
            "    for each in bucket:\n        dist.all_reduce(each.grad)\n    return\n    message = torch.cat",
            "a bucket of 5 gradients is one message",
        ),
    ],
    "ring_all_reduce": [
        ("    chunks = ", "    dist.all_reduce(tensor)\n    return\n    chunks = ", "dist.all_reduce was called"),
        ("(rank + 1) % world_size", "(rank - 1) % world_size", "rank 0 has sent to rank 2: in a ring"),
        ("        mine += arrived", "        mine = mine + arrived", "to its chunk of the same number, in place"),
        ("        handle.wait()\n", "", "has not called wait() on these handles: [isend, isend, isend, isend]"),
        ("like(mine)", "like(chunks[(rank - step) % world_size])", "The size of tensor a (2) must match the size of"),
        (
            "chunks[(rank + 1 - step) % world_size], right)\n        dist.recv(chunks[(rank - step)",
            "chunks[(rank - step) % world_size], right)\n        dist.recv(chunks[(rank - step - 1)",
            "message 3 of rank 0 is [1, 2], and should be [333, 444]: the second half begins with",
        ),
        (
            "        mine += arrived\n",
            "        chunks = list(chunks)\n        chunks[(rank - step - 1) % world_size] = mine + arrived\n",
            "all messages were right, but the sums are not in `tensor`",
        ),
        (
            """        handle = dist.isend(chunks[(rank - step) % world_size], right)
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
""",
            """        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        handle = dist.isend(chunks[(rank - step) % world_size], right)
""",
            "while a rank sends, its neighbour must receive",
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
            "the sums are right, but more was sent than in a ring with chunks",
        ),
    ],
    "sampler": [
        ("self.seed + self.epoch", "self.seed", "in epoch 1: each sample is dealt out once, but not in the order"),
        ("self.seed + self.epoch", "self.seed + self.epoch + self.rank", "cut the same order on all ranks"),
        (", generator=generator", "", "the sampler has drawn from torch's global generator"),
        (".tolist()", "", "a sampler yields the numbers of samples as ints"),
        ("len(range(self.rank, len(self.dataset), self.world_size))", "len(self.dataset)", "len() is not the number"),
        ("self.epoch = 0", "self.epoch = 1", "before the first set_epoch"),
        (":: self.world_size])", ":: 2])", "10 samples for 3 ranks: before the first set_epoch: samples [2, 5, 6"),
        (
            "        return iter(order",
            "        order += order[: -len(order) % self.world_size]\n        return iter(order",
            "without filling up",
        ),
        (
            """        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
""",
            """        self.generator = torch.Generator().manual_seed(self.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        if not hasattr(self, "generator"):
            self.set_epoch(0)
        order = torch.randperm(len(self.dataset), generator=self.generator).tolist()
""",
            "in epoch 0, when it is listed again",
        ),
    ],
    "exact_evaluation": [
        ("dist.all_reduce(counts)", "pass", "this is not the fraction of right answers"),
        ("dataset[dist.get_rank() :: dist.get_world_size()]", "dataset", "so that each is run once"),
        ("dist.get_world_size()", "3", "on 2 ranks, after all was right on 3"),
        ("dataset[dist.get_rank() :: dist.get_world_size()]", "[] if dist.get_rank() else dataset", "    rank 0: 17"),
        ("(counts[0] / counts[1]).item()", "counts[0] / counts[1]", "    rank 0: a Tensor"),
        ("    counts = ", "    1 / len(own)\n    counts = ", "2 samples on 3 ranks: line 8 of solution.py"),
        (
            "dist.all_reduce(counts)\n    return (counts[0] / counts[1]).item()",
            "mean = counts[0] / counts[1]\n    dist.all_reduce(mean)\n    return mean.item() / dist.get_world_size()",
            "this is the mean of the ranks' accuracies",
        ),
    ],
    "accumulate": [
        ("(loss / len(micro_batches))", "loss", "were added and not averaged: divide each loss by their number"),
        ("    optimizer.zero_grad()\n", "", "in step 2, of 2 micro-batches, the gradient of the step before was still"),
        ("nullcontext() if last else model.no_sync()", "nullcontext()", "the gradients have to be sent once"),
        ("contextlib.nullcontext() if last else ", "", "the gradients have to be sent once"),
        ("last = number == len(micro_batches)", "last = number == 1", "by the backward of the last micro-batch"),
        (
            "            loss = F",
            "            optimizer.zero_grad()\n            loss = F",
            "zero_grad() once in a step",
        ),
        ("    optimizer.step()\n", "        optimizer.step()\n", "make one optimizer step, after the"),
        ("len(micro_batches)).backward", "3).backward", "in step 2, of 2 micro-batches, divide each loss once"),
        (
            """        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
""",
            """        loss = F.mse_loss(model(inputs), targets)
        with contextlib.nullcontext() if last else model.no_sync():
""",
            "forward and backward, and the last one outside",
        ),
        (
            "    for number,",
            "    import torch\n\n    micro_batches = [tuple(map(torch.cat, zip(*micro_batches)))]\n    for number,",
            "several micro-batches were in memory at once",
        ),
        (
            """            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
""",
            """            loss = F.mse_loss(model(inputs), targets) + (0 if number == 1 else loss)
    (loss / len(micro_batches)).backward()
""",
            "several micro-batches were in memory at once",
        ),
    ],
    "zero1": [
        ("dist.broadcast(parameter.detach(), ", "dict(", "after the step the ranks have to exchange their parts"),
        ("[dist.get_rank() :: dist.get_world_size()]", "", "a rank keeps more than its part of the optimizer's state"),
        ("            parameter.grad /= dist.get_world_size()\n", "", "with the sums over the ranks: divide by"),
        ("dist.all_reduce(parameter.grad)", "continue", "is stepped by one rank, with the mean of the ranks'"),
        ("parameter.grad = None", "pass", "zero_grad() clears the gradients of all parameters"),
        ("list(module.parameters())", "list(module.parameters())[:4]", "each number of the module's own parameters"),
        ("AdamW(own, **settings)", "AdamW(own, lr=settings['lr'])", "which has all settings"),
    ],
    "loss_scaler": [
        ("return loss * self.factor", "return loss", "in step 1 scale(loss) has to return the loss times the scale"),
        ("                parameter.grad /= self.factor\n", "", "in step 1 the gradients are still multiplied"),
        ("        dist.all_reduce(overflows)\n", "", "in step 2 a gradient of rank 1 had overflowed, so all ranks"),
        ("if not self.was_skipped:", "if True:", "in step 2 a gradient of rank 1 had overflowed, so all ranks have to"),
        ("not parameter.grad.isfinite().all()", "parameter.grad.isinf().any()", "in step 5 a gradient of rank 0"),
        ("            self.factor /= 2\n", "", "in step 2 an overflow on any rank halves the scale of all ranks"),
        ("/= 2\n            self.steps_in_a_row = 0", "/= 2", "in step 4 an overflow on any rank halves"),
        ("optimizer.param_groups:", "optimizer.param_groups[:1]:", "those of all optimizer.param_groups"),
    ],
    "prepare": [
        ("return DistributedDataParallel(obj)", "return obj", "DistributedDataParallel, around the very network"),
        ("DistributedDataParallel(obj)", "DistributedDataParallel(__import__('copy').deepcopy(obj))", "the very"),
        ("    return obj\n", "", "Does it take, and return, what the starter file says?"),
        ("    return obj\n", "    return type(obj)(obj.param_groups[0]['params'])\n", "so return the very object"),
        ("    if isinstance(obj, DataLoader):", "    if False:", "every rank has the same samples"),
        ("obj.batch_size // dist.get_world_size()", "obj.batch_size", "a rank's is batch_size // world size"),
        (", shuffle=shuffle", "", "the ranks together do not have the samples of one batch, in the loader's order"),
        ("shuffle=shuffle", "shuffle=False", "the loader shuffles, and the prepared one does not"),
        ("shuffle=shuffle", "shuffle=shuffle, seed=dist.get_rank()", "because each rank has drawn an order of its own"),
        ("            collate_fn=obj.collate_fn,\n", "", "not what the loader's own collate_fn makes of the samples"),
        (
            "        return DataLoader(\n",
            """        if not isinstance(obj.sampler, RandomSampler):
            first = dist.get_rank()
            return [{name: each[first :: 2] for name, each in batch.items()} for batch in obj]
        return DataLoader(
""",
            "choose a rank's samples before they are read",
        ),
    ],
}
