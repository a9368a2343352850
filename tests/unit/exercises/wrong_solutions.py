"""The wrong solutions that beginners write, as changes to the right ones, and the idea that the checker has to name.

A change is a text of the right solution and what stands in its place. The idea is a part of the finding.
"""

from typing import NamedTuple


class Wrong(NamedTuple):
    """A wrong solution of an exercise."""

    exercise: str
    old: str
    new: str
    idea: str


# Of `accumulate`: the body of the loop over the micro-batches, and what stands in its place where the gradients are not
# sent by DDP.
BACKWARD_OF_EACH = """        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
"""
BACKWARD_IN_NO_SYNC = BACKWARD_OF_EACH.replace("contextlib.nullcontext() if last else ", "")
SENT_BY_HAND = f"""{BACKWARD_IN_NO_SYNC}
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
"""

WRONG = {
    "average_gradients: a sum": Wrong(
        "average_gradients",
        old="parameter.grad /= dist.get_world_size()",
        new="pass",
        idea="is the sum over the ranks: divide it by the world size",
    ),
    "average_gradients: two ranks taken for granted": Wrong(
        "average_gradients",
        old="dist.get_world_size()",
        new="2",
        idea="on 3 ranks the gradient of first.weight is divided by 2 however many ranks there are",
    ),
    "average_gradients: nothing added": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="pass",
        idea="divided by the world size, but not added up over the ranks",
    ),
    "average_gradients: nothing done": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="continue",
        idea="still each rank's own",
    ),
    "average_gradients: rank 0's for all": Wrong(
        "average_gradients",
        old="""dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()""",
        new="dist.broadcast(parameter.grad, src=0)",
        idea="is rank 0's on every rank: copied, and not averaged",
    ),
    "average_gradients: the weights": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="parameter.data *= 2",
        idea="the weights have changed; only the gradients are to be averaged",
    ),
    "average_gradients: a gradient for all": Wrong(
        "average_gradients",
        old="if parameter.grad is not None:",
        new="""if parameter.grad is None:
            parameter.grad = parameter.detach() * 0
        if True:""",
        idea="the unused layer has got a gradient",
    ),
    "average_gradients: the end at the first None": Wrong(
        "average_gradients",
        old="        if parameter.grad is not None:",
        new="""        if parameter.grad is None:
            break
        if True:""",
        idea="pass over the unused layer's None, and go on with the parameter after it",
    ),
    "average_gradients: None for a tensor": Wrong(
        "average_gradients",
        old="if parameter.grad is not None:",
        new="if True:",
        idea="all_reduce got None for a tensor: a parameter without a gradient has to be passed over",
    ),
    "average_gradients: not waited for": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="dist.all_reduce(parameter.grad, async_op=True)",
        idea="all_reduce with async_op=True returns a handle at once; call its wait() for the sum",
    ),
    "average_gradients: nothing sent where a gradient is zeros": Wrong(
        "average_gradients",
        old="if parameter.grad is not None:",
        new="if parameter.grad is not None and parameter.grad.any():",
        idea="rank 0: has returned\n    rank 1: line 8 of solution.py: dist.all_reduce(parameter.grad)\n"
        "    a rank that has returned does not answer: all ranks must call the same collectives, equally often",
    ),
    "average_gradients: a copy is sent": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="dist.all_reduce(parameter.grad.clone())",
        idea="not added up over the ranks: all_reduce has to be given `parameter.grad` itself",
    ),
    "average_gradients: divided twice": Wrong(
        "average_gradients",
        old="dist.get_world_size()",
        new="dist.get_world_size() ** 2",
        idea="is divided by the world size twice",
    ),
    "average_gradients: divided under way": Wrong(
        "average_gradients",
        old="""            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
""",
        new="""            handle = dist.all_reduce(parameter.grad, async_op=True)
            parameter.grad /= dist.get_world_size()
            handle.wait()
""",
        idea="a gradient was changed while its all-reduce was under way",
    ),
    "accumulate: not divided": Wrong(
        "accumulate",
        old="(loss / len(micro_batches))",
        new="loss",
        idea="divide each loss by the number of micro-batches",
    ),
    "accumulate: old gradients kept": Wrong(
        "accumulate",
        old="optimizer.zero_grad()",
        new="pass",
        idea="the old gradients were still there in the next step",
    ),
    "accumulate: sent each time": Wrong(
        "accumulate",
        old="nullcontext() if last else model.no_sync()",
        new="nullcontext()",
        idea="all micro-batches but the last one belong into `with model.no_sync():`, forward and backward",
    ),
    "accumulate: never sent": Wrong(
        "accumulate",
        old="contextlib.nullcontext() if last else model.no_sync()",
        new="model.no_sync()",
        idea="DDP has sent no gradient: the last micro-batch",
    ),
    "accumulate: the forward outside of no_sync": Wrong(
        "accumulate",
        old="""        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
""",
        new="""        loss = F.mse_loss(model(inputs), targets)
        with contextlib.nullcontext() if last else model.no_sync():
""",
        idea="the forward belongs into it too",
    ),
    "accumulate: one large batch": Wrong(
        "accumulate",
        old="    for number,",
        new="""    import torch

    micro_batches = [tuple(torch.cat(parts) for parts in zip(*micro_batches))]
    for number,""",
        idea="several micro-batches went through the network at once",
    ),
    "accumulate: the last micro-batch only": Wrong(
        "accumulate",
        old="            loss = F",
        new="""            optimizer.zero_grad()
            loss = F""",
        idea="only the last micro-batch has counted",
    ),
    "accumulate: a step each time": Wrong(
        "accumulate",
        old="""            (loss / len(micro_batches)).backward()
    optimizer.step()
""",
        new="""            (loss / len(micro_batches)).backward()
        optimizer.step()
""",
        idea="there was an optimizer step after each micro-batch, so nothing was accumulated",
    ),
    "accumulate: one backward of the sum": Wrong(
        "accumulate",
        old="""            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
""",
        new="""            loss = F.mse_loss(model(inputs), targets) + (0 if number == 1 else loss)
    (loss / len(micro_batches)).backward()
""",
        idea="several micro-batches were in memory at once",
    ),
    "accumulate: the first is sent": Wrong(
        "accumulate",
        old="last = number == len(micro_batches)",
        new="last = number == 1",
        idea="gradients were sent, but not in the backward of the last micro-batch",
    ),
    "accumulate: past DDP": Wrong(
        "accumulate",
        old="F.mse_loss(model(inputs), targets)",
        new="F.mse_loss(model.module(inputs), targets)",
        idea="the forward went past DDP: call model(inputs), and not model.module",
    ),
    "accumulate: no step": Wrong(
        "accumulate",
        old="    optimizer.step()\n",
        new="",
        idea="a train_step makes one optimizer step, after the backward of the last micro-batch and before zero_grad()",
    ),
    "accumulate: gradients cleared before the step": Wrong(
        "accumulate",
        old="    optimizer.step()\n    optimizer.zero_grad()\n",
        new="    optimizer.zero_grad()\n    optimizer.step()\n",
        idea="the weight has not moved: call optimizer.step() after the last backward, before zero_grad()",
    ),
    "accumulate: three micro-batches taken for granted": Wrong(
        "accumulate",
        old="len(micro_batches)).backward",
        new="3).backward",
        idea="the losses were divided by 3 in each step, and a step may have another number of micro-batches",
    ),
    "exact_evaluation: padded": Wrong(
        "exact_evaluation",
        old="own = dataset[dist.get_rank() :: dist.get_world_size()]",
        new="""from torch.utils.data import DistributedSampler

    own = [dataset[index] for index in DistributedSampler(dataset, shuffle=False)]""",
        idea="some were evaluated twice",
    ),
    "exact_evaluation: the tail dropped": Wrong(
        "exact_evaluation",
        old="own = dataset[dist.get_rank() :: dist.get_world_size()]",
        new="""share = len(dataset) // dist.get_world_size()
    own = dataset[dist.get_rank() * share :][:share]""",
        idea="some were left out",
    ),
    "exact_evaluation: the own share only": Wrong(
        "exact_evaluation",
        old="dist.all_reduce(counts)",
        new="pass",
        idea="the ranks return different numbers",
    ),
    "exact_evaluation: all on every rank": Wrong(
        "exact_evaluation",
        old="dataset[dist.get_rank() :: dist.get_world_size()]",
        new="dataset",
        idea="evaluated twice",
    ),
    "exact_evaluation: an empty share": Wrong(
        "exact_evaluation",
        old="    own = dataset[dist.get_rank() :: dist.get_world_size()]\n",
        new="    own = dataset[dist.get_rank() :: dist.get_world_size()]\n    1 / len(own)\n",
        idea="raised ZeroDivisionError: division by zero\n    1 / len(own)\n"
        "    with 3 samples on 7 ranks, so that some ranks have none",
    ),
    "exact_evaluation: a rank without samples does not answer": Wrong(
        "exact_evaluation",
        old="    counts = torch.zeros",
        new="    if not own:\n        return 0.0\n    counts = torch.zeros",
        idea="with 3 samples on 7 ranks, so that some ranks have none, a rank has returned, and does not answer",
    ),
    "exact_evaluation: a sum for rank 0": Wrong(
        "exact_evaluation",
        old="dist.all_reduce(counts)",
        new="dist.reduce(counts, dst=0)",
        idea="rank 0 has the right number, and other ranks have not",
    ),
    "exact_evaluation: a mean of means": Wrong(
        "exact_evaluation",
        old="""dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()""",
        new="""mean = counts[0] / counts[1]
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()""",
        idea="this is the mean of the ranks' accuracies, in which a small share counts as much as a large one",
    ),
    "exact_evaluation: seven ranks taken for granted": Wrong(
        "exact_evaluation",
        old="dist.get_world_size()",
        new="7",
        idea="on 1 rank, after all was right on 7: the number of ranks is dist.get_world_size()",
    ),
    "exact_evaluation: rank 0 runs all": Wrong(
        "exact_evaluation",
        old="dataset[dist.get_rank() :: dist.get_world_size()]",
        new="[] if dist.get_rank() else dataset",
        idea="rank 0 runs most samples, and the others wait for it: share them out",
    ),
    "exact_evaluation: not waited for": Wrong(
        "exact_evaluation",
        old="dist.all_reduce(counts)",
        new="dist.all_reduce(counts, async_op=True)",
        idea="rank 0 has not called wait() on these handles: [all_reduce]",
    ),
    "overlapped_ddp: not divided": Wrong(
        "overlapped_ddp",
        old="""        parameter.grad /= dist.get_world_size()
""",
        new="",
        idea="they are the sums over the ranks: divide by the world size",
    ),
    "overlapped_ddp: backward waits": Wrong(
        "overlapped_ddp",
        old="self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
        new="dist.all_reduce(parameter.grad)",
        idea="were called without async_op=True, so backward stood still",
    ),
    "overlapped_ddp: nobody waits": Wrong(
        "overlapped_ddp",
        old="            handle.wait()",
        new="            pass",
        idea="6 of 6 all-reduces were not waited for",
    ),
    "overlapped_ddp: divided under way": Wrong(
        "overlapped_ddp",
        old="""        parameter.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))""",
        new="""        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))
        parameter.grad /= dist.get_world_size()""",
        idea="were changed while their all-reduce was under way",
    ),
    "overlapped_ddp: after backward": Wrong(
        "overlapped_ddp",
        old="""            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)
""",
        new="""            parameter.register_post_accumulate_grad_hook(lambda _: None)

    def all(self):
        for parameter in self.module.parameters():
            self.start_all_reduce(parameter)
""",
        idea="no all-reduce was called",
    ),
    "overlapped_ddp: handles kept": Wrong(
        "overlapped_ddp",
        old="""        self.handles.clear()
""",
        new="",
        idea="handles were waited for again in the next step",
    ),
    "overlapped_ddp: a hook waits": Wrong(
        "overlapped_ddp",
        old="self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
        new="dist.all_reduce(parameter.grad, async_op=True).wait()",
        idea="4 of 6 handles were waited for while backward had gradients still to compute",
    ),
    "overlapped_ddp: hooks in forward": Wrong(
        "overlapped_ddp",
        old="""            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)

    def forward(self, inputs: Tensor) -> Tensor:
""",
        new="""
    def forward(self, inputs: Tensor) -> Tensor:
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)
""",
        idea="in step 2 the gradients of the 3 layers were sent [2, 2, 2] times, and not once each: hooks stay",
    ),
    "overlapped_ddp: the weights are sent": Wrong(
        "overlapped_ddp",
        old="dist.all_reduce(parameter.grad,",
        new="dist.all_reduce(parameter,",
        idea="6 of 6 all-reduces were given a parameter, which is the weights",
    ),
    "overlapped_ddp: copies are sent": Wrong(
        "overlapped_ddp",
        old="dist.all_reduce(parameter.grad,",
        new="dist.all_reduce(parameter.grad.clone(),",
        idea="divided by the world size: the sums arrive in copies of them: hand parameter.grad itself to all_reduce",
    ),
    "overlapped_ddp: a hook of the tensor": Wrong(
        "overlapped_ddp",
        old="parameter.register_post_accumulate_grad_hook(self.start_all_reduce)",
        new="parameter.register_hook(lambda _, parameter=parameter: self.start_all_reduce(parameter))",
        idea="register_hook calls its function before backward has written parameter.grad",
    ),
    "overlapped_ddp: two ranks taken for granted": Wrong(
        "overlapped_ddp",
        old="dist.get_world_size()",
        new="2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "overlapped_ddp: a hook of the module": Wrong(
        "overlapped_ddp",
        old="            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)\n",
        new="""        module.register_full_backward_hook(self.start_all)

    def start_all(self, *_):
        for parameter in self.module.parameters():
            self.start_all_reduce(parameter)
""",
        idea="a full backward hook of a module may be called before its parameters' gradients are there, when"
        " parameter.grad is None: use parameter.register_post_accumulate_grad_hook on each parameter",
    ),
    "overlapped_ddp: waited for in the next forward": Wrong(
        "overlapped_ddp",
        old="""        return self.module(inputs)

    def start_all_reduce(self, parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
""",
        new="""        for handle, parameter in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
        self.handles.clear()
        return self.module(inputs)

    def start_all_reduce(self, parameter: nn.Parameter) -> None:
        self.handles.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    def wait(self) -> None:
        pass
""",
        idea="3 of 3 all-reduces were not waited for before the optimizer's step",
    ),
    "buckets: the first layer first": Wrong(
        "buckets",
        old="reversed(parameters)",
        new="parameters",
        idea="the buckets begin with the first layer, whose gradient backward computes last",
    ),
    "buckets: the rest forgotten": Wrong(
        "buckets",
        old="""    if filling:
        buckets.append(filling)
""",
        new="",
        idea="a is in no bucket, so its gradient would never travel",
    ),
    "buckets: numbers for bytes": Wrong(
        "buckets",
        old="parameter.nbytes",
        new="parameter.numel()",
        idea="from 0. Yours count numbers, of 8 bytes each: parameter.nbytes counts bytes",
    ),
    "buckets: not divided": Wrong(
        "buckets",
        old="""    message /= dist.get_world_size()
""",
        new="",
        idea="they are the sums over the ranks",
    ),
    "buckets: a message for each": Wrong(
        "buckets",
        old="    message = torch.cat",
        new="""    for parameter in bucket:
        dist.all_reduce(parameter.grad)
    return
    message = torch.cat""",
        idea="a bucket of 5 gradients is one message",
    ),
    "buckets: not put back": Wrong(
        "buckets",
        old="parameter.grad.copy_(part.view_as(parameter))",
        new="pass",
        idea="put the means from the message back",
    ),
    "buckets: not waited for": Wrong(
        "buckets",
        old="dist.all_reduce(message)",
        new="dist.all_reduce(message, async_op=True)",
        idea="has returned while its all-reduce was under way",
    ),
    "buckets: the size never reset": Wrong(
        "buckets",
        old="            size = 0\n",
        new="",
        idea="and count the bytes of the next one from 0. Yours never count from 0 again",
    ),
    "buckets: the parameters sent": Wrong(
        "buckets",
        old="parameter.grad.flatten()",
        new="parameter.detach().flatten()",
        idea="they are made of the parameters: pack `parameter.grad`",
    ),
    "buckets: divided once more for each parameter": Wrong(
        "buckets",
        old="""    message /= dist.get_world_size()
    start = 0
    for parameter in bucket:
""",
        new="""    start = 0
    for parameter in bucket:
        message /= dist.get_world_size()
""",
        idea="the sums in a, b, c, d and e were divided by [2, 4, 8, 16, 32]: divide the message once",
    ),
    "buckets: put back the other way around": Wrong(
        "buckets",
        old="""    for parameter in bucket:
        part""",
        new="""    for parameter in reversed(bucket):
        part""",
        idea="put all parts back in the order in which they were packed",
    ),
    "buckets: two ranks taken for granted": Wrong(
        "buckets",
        old="message /= dist.get_world_size()",
        new="message /= 2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "buckets: closed above the capacity": Wrong(
        "buckets",
        old="size >= capacity",
        new="size > capacity",
        idea="Yours are closed when they hold more than that: >= is for exactly as many",
    ),
    "buckets: closed before the capacity is reached": Wrong(
        "buckets",
        old="""        filling.append(parameter)
        size += parameter.nbytes
        if size >= capacity:
            buckets.append(filling)
            filling = []
            size = 0
""",
        new="""        if filling and size + parameter.nbytes > capacity:
            buckets.append(filling)
            filling = []
            size = 0
        filling.append(parameter)
        size += parameter.nbytes
""",
        idea="Yours are closed before the parameter that fills them",
    ),
    "buckets: divided under way": Wrong(
        "buckets",
        old="""    dist.all_reduce(message)
    message /= dist.get_world_size()
""",
        new="""    handle = dist.all_reduce(message, async_op=True)
    message /= dist.get_world_size()
    handle.wait()
""",
        idea="the message was changed while its all-reduce was under way",
    ),
    "ring_all_reduce: one half": Wrong(
        "ring_all_reduce",
        old="""    for step in range(world_size - 1):
        handle = dist.isend(chunks[(rank + 1""",
        new="""    return
    for step in range(world_size - 1):
        handle = dist.isend(chunks[(rank + 1""",
        idea="so the first half, the reduce-scatter, is right",
    ),
    "ring_all_reduce: added in the second half": Wrong(
        "ring_all_reduce",
        old="        dist.recv(chunks[(rank - step) % world_size], left)",
        new="""        mine = chunks[(rank - step) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        mine += arrived""",
        idea="a chunk that arrives is finished, so copy it",
    ),
    "ring_all_reduce: the second half begins as the first": Wrong(
        "ring_all_reduce",
        old="""        handle = dist.isend(chunks[(rank + 1 - step) % world_size], right)
        dist.recv(chunks[(rank - step) % world_size], left)""",
        new="""        handle = dist.isend(chunks[(rank - step) % world_size], right)
        dist.recv(chunks[(rank - step - 1) % world_size], left)""",
        idea="Then its chunk (rank + 1) % world size is finished, and with this one, not with the chunk of its own",
    ),
    "ring_all_reduce: a collective": Wrong(
        "ring_all_reduce",
        old="    chunks = tensor",
        new="""    dist.all_reduce(tensor)
    return
    chunks = tensor""",
        idea="dist.all_reduce was called",
    ),
    "ring_all_reduce: the other way around": Wrong(
        "ring_all_reduce",
        old="""    right = (rank + 1) % world_size
    left = (rank - 1) % world_size""",
        new="""    left = (rank + 1) % world_size
    right = (rank - 1) % world_size""",
        idea="rank 0 sends to rank 2: in a ring each rank sends to its right neighbour",
    ),
    "ring_all_reduce: room for the chunk that is sent": Wrong(
        "ring_all_reduce",
        old="arrived = torch.empty_like(mine)",
        new="arrived = torch.empty_like(chunks[(rank - step) % world_size])",
        idea="RuntimeError: The size of tensor a (2) must match the size of tensor b (3)",
    ),
    "ring_all_reduce: whole tensors": Wrong(
        "ring_all_reduce",
        old="    chunks = tensor",
        new="""    travelling = tensor.clone()
    for _ in range(world_size - 1):
        handle = dist.isend(travelling.clone(), right)
        dist.recv(travelling, left)
        tensor += travelling
        handle.wait()
    return
    chunks = tensor""",
        idea="the sums are right, but more was sent than in a ring with chunks",
    ),
    "ring_all_reduce: handles of sends forgotten": Wrong(
        "ring_all_reduce",
        old="        handle.wait()\n",
        new="",
        idea="has not called wait() on these handles: [isend, isend, isend, isend]",
    ),
    "ring_all_reduce: a step too few": Wrong(
        "ring_all_reduce",
        old="for step in range(world_size - 1):\n        handle = dist.isend(chunks[(rank + 1",
        new="for step in range(world_size - 2):\n        handle = dist.isend(chunks[(rank + 1",
        idea="each half of the ring has W - 1 steps, so that a rank sends 4 chunks in all; these ranks have sent [3, 3",
    ),
    "ring_all_reduce: means": Wrong(
        "ring_all_reduce",
        old="""        dist.recv(chunks[(rank - step) % world_size], left)
        handle.wait()
""",
        new="""        dist.recv(chunks[(rank - step) % world_size], left)
        handle.wait()
    tensor /= world_size
""",
        idea="these are the means over the ranks, and the sums were asked for",
    ),
    "ring_all_reduce: received before it is sent": Wrong(
        "ring_all_reduce",
        old="""        handle = dist.isend(chunks[(rank - step) % world_size], right)
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
""",
        new="""        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        handle = dist.isend(chunks[(rank - step) % world_size], right)
""",
        idea="every rank waits in recv for a neighbour that has not sent yet: begin to send before you receive",
    ),
    "ring_all_reduce: three ranks taken for granted": Wrong(
        "ring_all_reduce",
        old="    chunks = tensor",
        new="""    world_size = 3
    chunks = tensor""",
        idea="on 2 ranks, after all was right on 3: the number of ranks is dist.get_world_size()",
    ),
    "ring_all_reduce: received into the own chunk": Wrong(
        "ring_all_reduce",
        old="""        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        mine += arrived
""",
        new="""        dist.recv(mine, left)
        mine += mine
""",
        idea="what arrived was written over your own chunk before the two were added. In the first half receive into",
    ),
    "ring_all_reduce: added, and not in place": Wrong(
        "ring_all_reduce",
        old="mine += arrived",
        new="mine.add(arrived)",
        idea="no sum was passed on in the first half. In each of its steps a rank adds what arrives to its chunk"
        " of the same number, and sends this very chunk in the next step: the numbers go down by one from"
        " step to step. It adds in place (chunk += arrived)",
    ),
    "ring_all_reduce: sums in new tensors": Wrong(
        "ring_all_reduce",
        old="        mine += arrived\n",
        new="""        chunks = list(chunks)
        chunks[(rank - step - 1) % world_size] = mine + arrived
""",
        idea="the sums of the first half are right, and were sent, but they are not in `tensor`: chunk + arrived"
        " is a new tensor",
    ),
    "sampler: the epoch forgotten": Wrong(
        "sampler",
        old="self.seed + self.epoch",
        new="self.seed",
        idea="the order is that of the epoch before",
    ),
    "sampler: a seed for each rank": Wrong(
        "sampler",
        old="self.seed + self.epoch",
        new="self.seed + self.epoch + self.rank",
        idea="the ranks do not cut the same order",
    ),
    "sampler: the global generator": Wrong(
        "sampler",
        old=", generator=generator",
        new="",
        idea="the sampler has drawn from torch's global generator, or seeded it",
    ),
    "sampler: filled up": Wrong(
        "sampler",
        old="        return iter(order",
        new="""        order += order[: -len(order) % self.world_size]
        return iter(order""",
        idea="do not fill up the shares",
    ),
    "sampler: the rest dropped": Wrong(
        "sampler",
        old="        return iter(order",
        new="""        order = order[: len(order) // self.world_size * self.world_size]
        return iter(order""",
        idea="are dealt out to nobody",
    ),
    "sampler: tensors": Wrong(
        "sampler",
        old=".tolist()",
        new="",
        idea="a sampler yields the numbers of samples as ints",
    ),
    "sampler: the wrong length": Wrong(
        "sampler",
        old="len(range(self.rank, len(self.dataset), self.world_size))",
        new="len(self.dataset) // self.world_size",
        idea="len() is not the number of samples",
    ),
    "sampler: a list for an iterator": Wrong(
        "sampler",
        old="return iter(",
        new="return list(",
        idea="__iter__ returned a list, of which there is no next one: return iter(...) of it",
    ),
    "sampler: seeded in set_epoch only": Wrong(
        "sampler",
        old="""        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
""",
        new="""        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(self.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=self.generator).tolist()
""",
        idea="epoch 0: list(sampler) gives something else the second time: __iter__ leaves the epoch as it is",
    ),
    "sampler: the first epoch is 1": Wrong(
        "sampler",
        old="self.epoch = 0",
        new="self.epoch = 1",
        idea="before set_epoch is called for the first time, the epoch is 0",
    ),
    "sampler: each rank shuffles its own samples": Wrong(
        "sampler",
        old="        order = torch.randperm(len(self.dataset), generator=generator).tolist()\n",
        new="""        order = list(range(len(self.dataset)))
        own = order[self.rank :: self.world_size]
        order[self.rank :: self.world_size] = [own[i] for i in torch.randperm(len(own), generator=generator)]
""",
        idea="epoch 0: each rank has the same samples in every epoch: shuffle all samples",
    ),
    "sampler: two ranks taken for granted": Wrong(
        "sampler",
        old=":: self.world_size])",
        new=":: 2])",
        idea="10 samples on 3 ranks: epoch 0: samples [2, 5, 6, 9] are dealt out more than once: of W ranks,"
        " rank r gets the positions r, r + W, r + 2 W and so on, and W is the world size, here 3",
    ),
    "sampler: the rank of the process group": Wrong(
        "sampler",
        old="order[self.rank",
        new="order[torch.distributed.get_rank()",
        idea="all ranks have the same samples: take the rank and the world size from the arguments of __init__",
    ),
    "zero1: parts not exchanged": Wrong(
        "zero1",
        old="            dist.broadcast(parameter.detach(), src=number % dist.get_world_size())",
        new="            pass",
        idea="in step 1 each rank has new numbers in its own part and old ones in the others'",
    ),
    "zero1: only the owner broadcasts": Wrong(
        "zero1",
        old="            dist.broadcast(",
        new="            if number % 2 == dist.get_rank():\n                dist.broadcast(",
        idea="a broadcast is not a send: the ranks that receive call it too",
    ),
    "zero1: everything on every rank": Wrong(
        "zero1",
        old="[dist.get_rank() :: dist.get_world_size()]",
        new="",
        idea="every rank keeps the optimizer's state of all parameters, as under DDP, so no memory is saved: give each"
        " rank's AdamW this rank's part of the parameters only; numbers in the state:\n    rank 0: 30\n    rank 1: 30",
    ),
    "zero1: not averaged": Wrong(
        "zero1",
        old="""            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
""",
        new="            pass\n",
        idea="they are each rank's own: average them first",
    ),
    "zero1: a sum": Wrong(
        "zero1",
        old="""            parameter.grad /= dist.get_world_size()
""",
        new="",
        idea="they are the sums over the ranks: divide by the world size. AdamW divides by a gradient's size",
    ),
    "zero1: old gradients kept": Wrong(
        "zero1",
        old="parameter.grad = None",
        new="pass",
        idea="those of the step before are still in them: zero_grad() has to clear them",
    ),
    "zero1: a copy is stepped": Wrong(
        "zero1",
        old="        self.optimizer = torch.optim.AdamW(own, **settings)",
        new="""        own = [nn.Parameter(parameter.detach().clone()) for parameter in own]
        self.optimizer = torch.optim.AdamW(own, **settings)""",
        idea="an AdamW made a step without gradients",
    ),
    "zero1: one rank steps": Wrong(
        "zero1",
        old="        self.optimizer.step()",
        new="        if dist.get_rank() == 0:\n            self.optimizer.step()",
        idea="has to call step() of this rank's AdamW once, on every rank; its calls:\n    rank 0: 2\n    rank 1: 0",
    ),
    "zero1: blocks that leave out the last": Wrong(
        "zero1",
        old="list(module.parameters())",
        new="list(module.parameters())[:4]",
        idea="in step 1 some parameters have moved on no rank: either nobody owns them",
    ),
    "zero1: a new AdamW in each step": Wrong(
        "zero1",
        old="        self.optimizer.step()",
        new="        torch.optim.AdamW(self.optimizer.param_groups[0]['params'], lr=0.1, eps=1.0).step()",
        idea="each rank makes one AdamW, in __init__, and keeps it, because a new one has no moments; those with which"
        " a rank has made steps:\n    rank 0: 2\n    rank 1: 2",
    ),
    "zero1: the settings forgotten": Wrong(
        "zero1",
        old="AdamW(own, **settings)",
        new="AdamW(own, lr=settings['lr'])",
        idea="AdamW has other settings than ZeRO1 was given: hand all of them on",
    ),
    "zero1: each rank averages what it owns": Wrong(
        "zero1",
        old="""        for parameter in self.parameters:
            dist.all_reduce(""",
        new="""        for parameter in self.optimizer.param_groups[0]["params"]:
            dist.all_reduce(""",
        idea="they are at different collectives: every rank calls one for each parameter",
    ),
    "zero1: two ranks taken for granted": Wrong(
        "zero1",
        old="dist.get_world_size()",
        new="2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "zero1: Adam": Wrong(
        "zero1",
        old="torch.optim.AdamW",
        new="torch.optim.Adam",
        idea="the steps were made by Adam, and not by AdamW",
    ),
    "loss_scaler: the loss not scaled": Wrong(
        "loss_scaler",
        old="return loss * self.factor",
        new="return loss",
        idea="in step 1 scale(loss) did not return the loss times the scale, but the loss: in fp16 a gradient of",
    ),
    "loss_scaler: gradients not divided": Wrong(
        "loss_scaler",
        old="                parameter.grad /= self.factor\n",
        new="",
        idea="in step 1 the gradients with which each rank made the step are not the true ones; they are still"
        " multiplied by the scale",
    ),
    "loss_scaler: each rank for itself": Wrong(
        "loss_scaler",
        old="        dist.all_reduce(overflows)\n",
        new="",
        idea="in step 2 rank 1 skipped the step, because a gradient of its part overflowed, and rank 0 made it: one"
        " part of the network has moved, and the other has not. No rank sees the others' gradients",
    ),
    "loss_scaler: only those that overflow ask": Wrong(
        "loss_scaler",
        old="        dist.all_reduce(overflows)\n",
        new="        if overflows:\n            dist.all_reduce(overflows)\n",
        idea="so in every step all ranks have to call an all-reduce",
    ),
    "loss_scaler: never skipped": Wrong(
        "loss_scaler",
        old="        if not self.was_skipped:\n            optimizer.step()",
        new="        optimizer.step()",
        idea="in step 2 rank 1 made the step, although a gradient of its part had overflowed",
    ),
    "loss_scaler: inf only": Wrong(
        "loss_scaler",
        old="not parameter.grad.isfinite().all()",
        new="parameter.grad.isinf().any()",
        idea="in step 5 rank 0 made the step with a gradient that is nan: inf is not the only sign",
    ),
    "loss_scaler: zeros for inf": Wrong(
        "loss_scaler",
        old="        if not self.was_skipped:\n            optimizer.step()",
        new="""        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self.was_skipped:
                    parameter.grad.zero_()
        optimizer.step()""",
        idea="the optimizer's momentum moves the weights even for zeros",
    ),
    "loss_scaler: the scale of one rank": Wrong(
        "loss_scaler",
        old="        dist.all_reduce(overflows)\n        self.was_skipped = overflows.item() > 0\n",
        new="""        self.was_skipped = overflows.item() > 0
        dist.all_reduce(overflows)
        if overflows and not self.was_skipped:
            return
""",
        idea="in step 2 the ranks have different scales after the step",
    ),
    "loss_scaler: never halved": Wrong(
        "loss_scaler",
        old="            self.factor /= 2\n",
        new="",
        idea="in step 2 an overflow on any rank halves the scale of all ranks",
    ),
    "loss_scaler: never doubled": Wrong(
        "loss_scaler",
        old="            self.factor *= 2\n",
        new="",
        idea="in step 4 the second step in a row without an overflow (growth_interval=2) doubles the scale",
    ),
    "loss_scaler: counted through an overflow": Wrong(
        "loss_scaler",
        old="            self.factor /= 2\n            self.steps_in_a_row = 0\n",
        new="            self.factor /= 2\n            self.steps_in_a_row -= 1\n",
        idea="in step 3 the scale stays: the steps in a row are counted anew after an overflow",
    ),
    "loss_scaler: the last parameter decides": Wrong(
        "loss_scaler",
        old="overflows += not parameter.grad.isfinite().all()",
        new="overflows = 1 - parameter.grad.isfinite().all().float()",
        idea="in step 2 rank 1 made the step, although a gradient of its part had overflowed: look at all gradients",
    ),
    "loss_scaler: the first group only": Wrong(
        "loss_scaler",
        old="in optimizer.param_groups:",
        new="in optimizer.param_groups[:1]:",
        idea="those of the second group in optimizer.param_groups are still multiplied by the scale",
    ),
    "loss_scaler: an all-reduce for each parameter": Wrong(
        "loss_scaler",
        old="        dist.all_reduce(overflows)\n",
        new="                dist.all_reduce(overflows)\n",
        idea="unequal numbers of parameters, [2, 3]: one all-reduce, after the loop over them",
    ),
    "prepare: the network not wrapped": Wrong(
        "prepare",
        old="return DistributedDataParallel(obj)",
        new="return obj",
        idea="each rank begins with weights of its own: DistributedDataParallel gives all ranks those of rank 0",
    ),
    "prepare: the weights of rank 0, and no more": Wrong(
        "prepare",
        old="return DistributedDataParallel(obj)",
        new="dist.broadcast(obj.weight.detach(), src=0)\n        return obj",
        idea="the ranks drift apart, because each steps with the gradients of its own samples",
    ),
    "prepare: a copy of the network": Wrong(
        "prepare",
        old="DistributedDataParallel(obj)",
        new="DistributedDataParallel(__import__('copy').deepcopy(obj))",
        idea="the optimizer does not hold the parameters of the network that came back",
    ),
    "prepare: a new optimizer": Wrong(
        "prepare",
        old="    return obj\n",
        new="    import torch\n\n    return torch.optim.SGD(obj.param_groups[0]['params'])\n",
        idea="the optimizer that came back is another one than was given, without its settings and its state",
    ),
    "prepare: the optimizer forgotten": Wrong(
        "prepare",
        old="    return obj\n",
        new="",
        idea="prepare was given DataLoader, Linear, SGD, DataLoader; it returned DataLoader, DistributedDataParallel,"
        " NoneType, DataLoader: each object belongs",
    ),
    "prepare: another order": Wrong(
        "prepare",
        old="for obj in objects]",
        new="for obj in objects][::-1]",
        idea="each object belongs to the place in which it came",
    ),
    "prepare: nothing returned": Wrong(
        "prepare",
        old="    return [prepare_one",
        new="    [prepare_one",
        idea="it returned None, and not a list",
    ),
    "prepare: all samples on every rank": Wrong(
        "prepare",
        old="    if isinstance(obj, DataLoader):",
        new="    if False:",
        idea="every rank has all samples of a batch, so all compute the same",
    ),
    "prepare: the batch size of all ranks on each": Wrong(
        "prepare",
        old="obj.batch_size // dist.get_world_size()",
        new="obj.batch_size",
        idea="a step takes 12 samples, and an epoch has fewer steps",
    ),
    "prepare: always shuffled": Wrong(
        "prepare",
        old=", shuffle=shuffle",
        new="",
        idea="keep the loader's order where it does not shuffle",
    ),
    "prepare: never shuffled": Wrong(
        "prepare",
        old="shuffle=shuffle",
        new="shuffle=False",
        idea="the loader shuffles, and the prepared one does not",
    ),
    "prepare: no collate_fn": Wrong(
        "prepare",
        old="            collate_fn=obj.collate_fn,\n",
        new="",
        idea="not what the loader's own collate_fn makes of the samples",
    ),
    "prepare: a seed for each rank": Wrong(
        "prepare",
        old="shuffle=shuffle",
        new="shuffle=shuffle, seed=dist.get_rank()",
        idea="because each rank has drawn an order of its own",
    ),
    "prepare: batches are read and cut": Wrong(
        "prepare",
        old="        return DataLoader(\n",
        new="""
        class Cut:
            def __iter__(self):
                for batch in obj:
                    yield {name: values[dist.get_rank() :: 2] for name, values in batch.items()}

        return Cut()
        return DataLoader(
""",
        idea="it has read others from the dataset too, and thrown them away",
    ),
    "prepare: two ranks taken for granted": Wrong(
        "prepare",
        old="// dist.get_world_size()",
        new="// 2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
}
