"""The wrong solutions that beginners write, as patches of the right ones, and what the checker has to say of each.

A row is a text of the right solution, what stands in its place, and a part of the finding.
"""

# Of `accumulate`: the body of the loop over the micro-batches, and what stands in its place where the gradients are not
# sent by DDP.
BACKWARD_OF_EACH = """        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
"""
SENT_BY_HAND = """        with model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()

    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
"""

WRONG = {
    "average_gradients": [
        (
            "parameter.grad /= dist.get_world_size()",
            "pass",
            "they are the sums over the ranks: divide by the world size",
        ),
        ("dist.get_world_size()", "2", "on 3 ranks, after all was right on 2 (is there a 2 in your code"),
        ("dist.all_reduce(parameter.grad)", "continue", "they are each rank's own: "),
        ("parameter.grad)", "parameter.grad.clone())", "hand parameter.grad itself to all_reduce"),
        ("all_reduce(parameter.grad)", "broadcast(parameter.grad, src=0); continue", "rank 0's on every rank: copied"),
        ("all_reduce(parameter.grad)", "reduce(parameter.grad, dst=0)", "rank 0 has them, and other ranks have not"),
        ("get_world_size()", "get_world_size() ** 2", "they are divided by the world size twice"),
        ("dist.all_reduce(parameter.grad)", "dist.all_reduce(parameter.data)", "the weights have changed"),
        ("if parameter.grad is not None:", "if True:", "a parameter without a gradient has to be passed over"),
        (
            "        if parameter.grad is not None:",
            "        if parameter.grad is None:\n            break\n        if True:",
            "pass over the unused layer's None, and go on with the parameter after it",
        ),
        (
            "        if parameter.grad is not None:",
            "        if parameter.grad is None:\n            parameter.grad = parameter.detach() * 0\n        if True:",
            "the unused layer has got a gradient",
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
        ("dist.get_world_size()", "2", "on 3 ranks, after all was right on 2"),
        (", async_op=True", "", "all_reduce returned None and no handle: without async_op=True it makes backward wait"),
        (
            "self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
            "dist.all_reduce(parameter.grad)",
            "were called without async_op=True, so backward stood still",
        ),
        (
            "self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
            "dist.all_reduce(parameter.grad, async_op=True).wait()",
            "4 of 6 all-reduces were waited for while backward had gradients still to compute",
        ),
        (
            "            handle.wait()",
            "            pass",
            "6 of 6 all-reduces were not waited for before the",
        ),
        ("        self.handles.clear()\n", "", "were waited for again in the next step"),
        ("dist.all_reduce(parameter.grad,", "dist.all_reduce(parameter,", "6 of 6 all-reduces were given a parameter"),
        (
            "dist.all_reduce(parameter.grad,",
            "dist.all_reduce(parameter.grad.clone(),",
            "hand parameter.grad itself to all_reduce",
        ),
        (
            "parameter.register_post_accumulate_grad_hook(self.start_all_reduce)",
            "pass",
            "the gradients of the 3 layers were sent [0, 0, 0] times, and not once each",
        ),
        (
            "        for handle in self.handles:\n",
            "        for parameter in self.module.parameters():\n            self.start_all_reduce(parameter)\n"
            "        for handle in self.handles:\n",
            "the gradients of the 3 layers were sent [2, 2, 2] times, and not once each",
        ),
        (
            """            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)

    def forward(self, inputs: Tensor) -> Tensor:
""",
            """
    def forward(self, inputs: Tensor) -> Tensor:
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)
""",
            "in step 2 the gradients of the 3 layers were sent [2, 2, 2] times, and not once each: hooks stay",
        ),
        (
            "parameter.register_post_accumulate_grad_hook(self.start_all_reduce)",
            "parameter.register_hook(lambda _, parameter=parameter: self.start_all_reduce(parameter))",
            "may call a function before parameter.grad is written",
        ),
        (
            "            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)\n",
            """        module.register_full_backward_hook(self.start_all)

    def start_all(self, *_):
        for parameter in self.module.parameters():
            self.start_all_reduce(parameter)
""",
            "use parameter.register_post_accumulate_grad_hook on each parameter",
        ),
    ],
    "buckets": [
        ("reversed(parameters)", "parameters", "from the last parameter, whose gradient backward computes first"),
        (
            "    if filling:\n        buckets.append(filling)\n",
            "",
            "a is in no bucket, so its gradient would never travel",
        ),
        ("parameter.nbytes", "parameter.numel()", "capacity 40: a bucket is closed at another place. Close it when it"),
        ("size >= capacity", "size > capacity", "capacity 40: a bucket is closed at another place. Close it when it"),
        ("            size = 0\n", "", "and count the next one from 0"),
        ("    message /= dist.get_world_size()\n", "", "they are the sums over the ranks"),
        ("message /= dist.get_world_size()", "message /= 2", "on 3 ranks, after all was right on 2"),
        ("parameter.grad.copy_(part.view_as(parameter))", "pass", "they are each rank's own"),
        ("parameter.grad.flatten()", "parameter.detach().flatten()", "they are made of the parameters"),
        ("parameter.grad.flatten()", "parameter.grad.float().flatten()", "they are rounded: give your own tensors the"),
        ("    for parameter in bucket:", "    for parameter in reversed(bucket):", "in which they were packed"),
        (
            "dist.all_reduce(message)",
            "dist.all_reduce(message, async_op=True)",
            "has not called wait() on these handles",
        ),
        (
            "    message = torch.cat",
            """    for parameter in bucket:
        dist.all_reduce(parameter.grad)
    return
    message = torch.cat""",
            "a bucket of 5 gradients is one message",
        ),
    ],
    "ring_all_reduce": [
        (
            "    chunks = tensor",
            "    dist.all_reduce(tensor)\n    return\n    chunks = tensor",
            "dist.all_reduce was called",
        ),
        ("(rank + 1) % world_size", "(rank - 1) % world_size", "the isend of rank 0 is to, or from, rank 2: in a ring"),
        ("        mine += arrived", "        mine = mine + arrived", "chunk + arrived is a new tensor"),
        ("        handle.wait()\n", "", "has not called wait() on these handles: [isend, isend, isend, isend]"),
        (
            "    for step in range(world_size - 1):\n        handle = dist.isend(chunks[(rank + 1",
            "    return\n    for step in range(world_size - 1):\n        handle = dist.isend(chunks[(rank + 1",
            "the reduce-scatter and then the all-gather",
        ),
        ("like(mine)", "like(chunks[(rank - step) % world_size])", "The size of tensor a (2) must match the size of"),
        ("    chunks = tensor", "    world_size = 3\n    chunks = tensor", "on 2 ranks, after all was right on 3"),
        (
            """        dist.recv(chunks[(rank - step) % world_size], left)
        handle.wait()
""",
            """        dist.recv(chunks[(rank - step) % world_size], left)
        handle.wait()
    tensor /= world_size
""",
            "these are the means over the ranks, and the sums were asked for",
        ),
        (
            "        dist.recv(chunks[(rank - step) % world_size], left)",
            """        mine = chunks[(rank - step) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        mine += arrived""",
            "a chunk that arrives is finished: copy it, do not add it",
        ),
        (
            """        handle = dist.isend(chunks[(rank + 1 - step) % world_size], right)
        dist.recv(chunks[(rank - step) % world_size], left)""",
            """        handle = dist.isend(chunks[(rank - step) % world_size], right)
        dist.recv(chunks[(rank - step - 1) % world_size], left)""",
            "message 3 of rank 0 is [1, 2], and should be [333, 444]",
        ),
        (
            "        dist.recv(arrived, left)\n        mine += arrived\n",
            "        dist.recv(mine, left)\n        mine += mine\n",
            "receives into a tensor of its own, such as torch.empty_like(chunk)",
        ),
        (
            "        mine += arrived\n",
            "        chunks = list(chunks)\n        chunks[(rank - step - 1) % world_size] = mine + arrived\n",
            "all messages were right, but the sums are not in `tensor`",
        ),
        (
            "        handle = dist.isend(chunks[(rank - step) % world_size], right)\n",
            "        dist.send(chunks[(rank - step) % world_size], right)\n",
            "if all are in send, or wait for it, nobody receives",
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
            "if all ranks are in recv, nobody has sent yet",
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
        ("self.seed + self.epoch", "self.seed", "epoch 1: the order is that of the epoch before"),
        ("self.seed + self.epoch", "self.seed + self.epoch + self.rank", "the ranks do not cut the same order"),
        (", generator=generator", "", "the sampler has drawn from torch's global generator"),
        (".tolist()", "", "a sampler yields the numbers of samples as ints"),
        ("len(range(self.rank, len(self.dataset), self.world_size))", "len(self.dataset)", "len() is not the number"),
        ("return iter(", "return list(", "raised TypeError: iter() returned non-iterator of type"),
        ("self.epoch = 0", "self.epoch = 1", "before set_epoch is called for the first time, the epoch is 0"),
        (":: self.world_size])", ":: 2])", "10 samples for 3 ranks: epoch 0: samples [2, 5, 6, 9] are dealt out more"),
        (
            "order[self.rank",
            "order[torch.distributed.get_rank()",
            "take the rank and the world size from the arguments",
        ),
        (
            "        return iter(order",
            "        order += order[: -len(order) % self.world_size]\n        return iter(order",
            "do not fill up the shares",
        ),
        (
            "        return iter(order",
            "        order = order[: len(order) // self.world_size * self.world_size]\n        return iter(order",
            "are dealt out to nobody",
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
            "epoch 0: list(sampler) gives something else the second time",
        ),
        (
            "        order = torch.randperm(len(self.dataset), generator=generator).tolist()\n",
            """        order = list(range(len(self.dataset)))
        own = order[self.rank :: self.world_size]
        order[self.rank :: self.world_size] = [own[i] for i in torch.randperm(len(own), generator=generator)]
""",
            "but not in the order that was asked for: torch.randperm of all samples",
        ),
    ],
    "exact_evaluation": [
        ("dist.all_reduce(counts)", "pass", "the ranks return different numbers"),
        ("dataset[dist.get_rank() :: dist.get_world_size()]", "dataset", "some were evaluated twice"),
        ("all_reduce(counts)", "reduce(counts, dst=0)", "rank 0 has the right number, and other ranks have not"),
        ("dist.get_world_size()", "7", "on 1 rank, after all was right on 7"),
        ("dataset[dist.get_rank() :: dist.get_world_size()]", "[] if dist.get_rank() else dataset", "rank 0 runs most"),
        ("(counts)\n", "(counts, async_op=True)\n", "rank 0 has not called wait() on these handles: [all_reduce]"),
        (
            "    counts = ",
            "    1 / len(own)\n    counts = ",
            "3 samples on 7 ranks: line 8 of solution.py: 1 / len(own)\n    raised ZeroDiv",
        ),
        (
            "    counts = ",
            "    if not own:\n        return 0.0\n    counts = ",
            "with fewer samples than ranks some have none",
        ),
        (
            "own = dataset[dist.get_rank() :: dist.get_world_size()]",
            """from torch.utils.data import DistributedSampler

    own = [dataset[index] for index in DistributedSampler(dataset, shuffle=False)]""",
            "some were evaluated twice",
        ),
        (
            "own = dataset[dist.get_rank() :: dist.get_world_size()]",
            "share = len(dataset) // dist.get_world_size()\n    own = dataset[dist.get_rank() * share :][:share]",
            "some were left out",
        ),
        (
            "dist.all_reduce(counts)\n    return (counts[0] / counts[1]).item()",
            "mean = counts[0] / counts[1]\n    dist.all_reduce(mean)\n    return mean.item() / dist.get_world_size()",
            "this is the mean of the ranks' accuracies, in which a small share counts as much as a large one",
        ),
    ],
    "accumulate": [
        ("    optimizer.step()\n", "    micro_batches.clear()\n    optimizer.step()\n", "micro-batches has changed"),
        ("(loss / len(micro_batches))", "loss", "were added and not averaged: divide each loss by their number"),
        ("    optimizer.zero_grad()\n", "", "in step 2, of 2 micro-batches, the old gradients were still there"),
        ("nullcontext() if last else model.no_sync()", "nullcontext()", "were the backwards [1, 2, 3]"),
        ("contextlib.nullcontext() if last else ", "", "by the backward of the last micro-batch, which sends the sum"),
        (
            "            loss = F",
            "            optimizer.zero_grad()\n            loss = F",
            "only the last micro-batch has",
        ),
        ("    optimizer.step()\n", "", "a train_step makes one optimizer step, after the backward of the last"),
        ("    optimizer.step()\n", "        optimizer.step()\n", "a train_step makes one optimizer step, after the"),
        (
            "len(micro_batches)).backward",
            "3).backward",
            "in step 2, of 2 micro-batches, the weight is not that of one device",
        ),
        (
            "last = number == len(micro_batches)",
            "last = number == 1",
            "Outside of no_sync() were the backwards [1]",
        ),
        (
            "model(inputs)",
            "model.module(inputs)",
            "the forward went past DDP: call model(inputs), and not model.module",
        ),
        (
            "    optimizer.step()\n    optimizer.zero_grad()\n",
            "    optimizer.zero_grad()\n    optimizer.step()\n",
            "the weight has not moved: call optimizer.step() after the last backward, before zero_grad()",
        ),
        (
            """        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
""",
            """        loss = F.mse_loss(model(inputs), targets)
        with contextlib.nullcontext() if last else model.no_sync():
""",
            "DDP decides in the forward whether the next backward sends",
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
        ("            parameter.grad /= dist.get_world_size()\n", "", "they are the sums over the ranks: divide by"),
        ("dist.all_reduce(parameter.grad)", "continue", "they are each rank's own: average them"),
        ("parameter.grad = None", "pass", "zero_grad() has to clear the gradients of all parameters"),
        ("list(module.parameters())", "list(module.parameters())[:4]", "some parameters have moved on no rank"),
        ("AdamW(own, **settings)", "AdamW(own, lr=settings['lr'])", "AdamW has other settings than ZeRO1 was given"),
        ("dist.get_world_size()", "2", "on 3 ranks, after all was right on 2"),
        ("torch.optim.AdamW", "torch.optim.Adam", "the steps were made by Adam, and not by AdamW"),
        (
            "            dist.broadcast(",
            "            if number % 2 == dist.get_rank():\n                dist.broadcast(",
            "A broadcast is not a send: the ranks that receive call it too",
        ),
        (
            "        self.optimizer = torch.optim.AdamW(own, **settings)",
            "        own = [nn.Parameter(each.detach().clone()) for each in own]\n"
            "        self.optimizer = torch.optim.AdamW(own, **settings)",
            "there are none, and the step moves nothing",
        ),
        (
            "        self.optimizer.step()",
            "        torch.optim.AdamW(self.optimizer.param_groups[0]['params'], lr=0.1, eps=1.0).step()",
            "a new one has no moments",
        ),
        (
            "        self.optimizer.step()",
            "        if dist.get_rank() == 0:\n            self.optimizer.step()",
            "has to call step() of this rank's AdamW once, on every rank; its calls:\n    rank 0: 2\n    rank 1: 0",
        ),
        (
            "        for parameter in self.parameters:\n            dist.all_reduce(",
            "        for parameter in self.optimizer.param_groups[0]['params']:\n            dist.all_reduce(",
            "all ranks call the same collectives, for each parameter and in the same order, and not only",
        ),
    ],
    "loss_scaler": [
        (
            "return loss * self.factor",
            "return loss",
            "in step 1 scale(loss) did not return the loss times the scale, but",
        ),
        ("                parameter.grad /= self.factor\n", "", "they are still multiplied by the scale"),
        (
            "        dist.all_reduce(overflows)\n",
            "",
            "in step 2 rank 1 skipped the step, because a gradient of its part",
        ),
        ("if not self.was_skipped:", "if True:", "in step 2 rank 1 made the step, although a gradient of its part had"),
        (
            "not parameter.grad.isfinite().all()",
            "parameter.grad.isinf().any()",
            "in step 5 rank 0 made the step with a",
        ),
        ("            self.factor /= 2\n", "", "in step 2 an overflow on any rank halves the scale of all ranks"),
        ("            self.factor *= 2\n", "", "in step 4 the scale doubles after growth_interval steps in a row"),
        (
            "/= 2\n            self.steps_in_a_row = 0",
            "/= 2",
            "which are counted anew after an overflow",
        ),
        (
            "optimizer.param_groups:",
            "optimizer.param_groups[:1]:",
            "only those of the first group in optimizer.param_gr",
        ),
        (
            "overflows += not parameter.grad.isfinite().all()",
            "overflows = 1 - parameter.grad.isfinite().all().float()",
            "in step 2 rank 1 made the step, although a gradient of its part had overflowed: look at all gradients",
        ),
        (
            "        dist.all_reduce(overflows)\n",
            "                dist.all_reduce(overflows)\n",
            "in every step all ranks have to call one all-reduce, after the loop over their parameters",
        ),
        (
            "        dist.all_reduce(overflows)\n        self.was_skipped = overflows.item() > 0\n",
            """        self.was_skipped = overflows.item() > 0
        dist.all_reduce(overflows)
        if overflows and not self.was_skipped:
            return
""",
            "in step 2 the ranks have different scales after the step",
        ),
    ],
    "prepare": [
        ("return DistributedDataParallel(obj)", "return obj", "DistributedDataParallel gives all ranks the weights"),
        ("    return obj\n", "", "each in the place in which it came"),
        ("for obj in objects]", "for obj in objects][::-1]", "each in the place in which it came"),
        ("    return [prepare_one", "    [prepare_one", "it returned None: it has to return a list"),
        (
            "    if isinstance(obj, DataLoader):",
            "    if False:",
            "every rank has the same samples, so all compute the same",
        ),
        (
            "obj.batch_size // dist.get_world_size()",
            "obj.batch_size",
            "a step takes 12 samples, and an epoch has fewer",
        ),
        (", shuffle=shuffle", "", "keep the loader's order where it does not shuffle"),
        ("shuffle=shuffle", "shuffle=False", "the loader shuffles, and the prepared one does not"),
        ("shuffle=shuffle", "shuffle=shuffle, seed=dist.get_rank()", "because each rank has drawn an order of its own"),
        ("            collate_fn=obj.collate_fn,\n", "", "not what the loader's own collate_fn makes of the samples"),
        ("// dist.get_world_size()", "// 2", "on 3 ranks, after all was right on 2"),
        (
            "return DistributedDataParallel(obj)",
            "dist.broadcast(obj.weight.detach(), src=0)\n        return obj",
            "and averages their gradients, so that the ranks do not drift apart",
        ),
        (
            "DistributedDataParallel(obj)",
            "DistributedDataParallel(__import__('copy').deepcopy(obj))",
            "the optimizer does not hold the parameters of the network that came back",
        ),
        (
            "    return obj\n",
            "    import torch\n\n    return torch.optim.SGD(obj.param_groups[0]['params'])\n",
            "the optimizer that came back is another one than was given, without its settings and its state",
        ),
        (
            "        return DataLoader(\n",
            """
        class Cut:
            def __iter__(self):
                for batch in obj:
                    yield {name: values[dist.get_rank() :: 2] for name, values in batch.items()}

        return Cut()
        return DataLoader(
""",
            "it has read others from the dataset too, and thrown them away",
        ),
    ],
}
