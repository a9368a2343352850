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
    "average_gradients: the result of all_reduce": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="parameter.grad = 1 * dist.all_reduce(parameter.grad)",
        idea="all_reduce puts the sum into the tensor that it is given, and returns None",
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
    "average_gradients: on rank 0 only": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="dist.reduce(parameter.grad, dst=0)",
        idea="is the mean on rank 0 only: the other ranks need it too",
    ),
    "average_gradients: the weights": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="parameter.data *= 2",
        idea="the weights have changed; only the gradients are to be averaged",
    ),
    "average_gradients: not the bias": Wrong(
        "average_gradients",
        old="if parameter.grad is not None:",
        new="if parameter.grad is not None and parameter.dim() == 2:",
        idea="the gradient of first.bias is still each rank's own",
    ),
    "average_gradients: a gradient for all": Wrong(
        "average_gradients",
        old="if parameter.grad is not None:",
        new="""if parameter.grad is None:
            parameter.grad = parameter.detach() * 0
        if True:""",
        idea="the unused layer has got a gradient",
    ),
    "average_gradients: the sum divided in another tensor": Wrong(
        "average_gradients",
        old="parameter.grad /= dist.get_world_size()",
        new="gradient = parameter.grad / dist.get_world_size()",
        idea="is the sum over the ranks: divide it by the world size, in `parameter.grad` itself",
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
    "average_gradients: pairs of names and parameters": Wrong(
        "average_gradients",
        old="model.parameters()",
        new="model.named_parameters()",
        idea="\n    named_parameters() has pairs of a name and a parameter",
    ),
    "average_gradients: a method that is not called": Wrong(
        "average_gradients",
        old="model.parameters()",
        new="model.parameters",
        idea="\n    without parentheses a method is not called",
    ),
    "average_gradients: another process group": Wrong(
        "average_gradients",
        old="    for parameter in",
        new="""    dist.init_process_group("gloo")
    for parameter in""",
        idea="\n    there is a process group already, which the checker has made",
    ),
    "average_gradients: a copy is sent": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="dist.all_reduce(parameter.grad.clone())",
        idea="not added up over the ranks: all_reduce has to be given `parameter.grad` itself",
    ),
    "average_gradients: the greatest of all ranks": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)",
        idea="is not the mean over the ranks, which is the sum over them, divided once by the world size",
    ),
    "average_gradients: the ranks of one machine": Wrong(
        "average_gradients",
        old="dist.get_world_size()",
        new='int(__import__("os").environ["LOCAL_WORLD_SIZE"])',
        idea="LOCAL_RANK and LOCAL_WORLD_SIZE count the ranks of one machine",
    ),
    "average_gradients: the group destroyed": Wrong(
        "average_gradients",
        old="""parameter.grad /= dist.get_world_size()
""",
        new="""parameter.grad /= dist.get_world_size()
    dist.destroy_process_group()
""",
        idea="destroy_process_group was called: the program that calls your code still needs the group",
    ),
    "average_gradients: divided twice": Wrong(
        "average_gradients",
        old="dist.get_world_size()",
        new="dist.get_world_size() ** 2",
        idea="is divided by the world size twice",
    ),
    "average_gradients: divided down to a whole number": Wrong(
        "average_gradients",
        old="/=",
        new="//=",
        idea="is a whole number: // rounds down",
    ),
    "average_gradients: divided after the loop": Wrong(
        "average_gradients",
        old="            parameter.grad /=",
        new="    parameter.grad /=",
        idea="that of last.bias is right: does the loop do everything for each parameter?",
    ),
    "average_gradients: a copy of less precision": Wrong(
        "average_gradients",
        old="""            dist.all_reduce(parameter.grad)
""",
        new="""            less = parameter.grad.float()
            dist.all_reduce(less)
            parameter.grad.copy_(less)
""",
        idea="is right to a few digits only, because it was rounded on the way",
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
    "average_gradients: no handle to wait for": Wrong(
        "average_gradients",
        old="dist.all_reduce(parameter.grad)",
        new="dist.all_reduce(parameter.grad).wait()",
        idea="without async_op=True a collective returns no handle",
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
    "accumulate: a training in small batches": Wrong(
        "accumulate",
        old=f"{BACKWARD_OF_EACH}    optimizer.step()\n    optimizer.zero_grad()\n",
        new="""        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        idea="there was an optimizer step after each micro-batch, so nothing was accumulated: that is a training in"
        " small batches. Let the gradients of all micro-batches add up in `.grad`, which backward does by itself, and"
        " then make one step; the optimizer's steps in each train_step:\n    rank 0: [3, 2]\n    rank 1: [3, 2]",
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
    "accumulate: no_sync without with": Wrong(
        "accumulate",
        old="        with contextlib.nullcontext() if last else model.no_sync():\n",
        new="        model.no_sync()\n        if True:\n",
        idea="all micro-batches but the last one belong into `with model.no_sync():`, forward and backward",
    ),
    "accumulate: the caller's list": Wrong(
        "accumulate",
        old="    for number, (inputs, targets) in enumerate(micro_batches, start=1):\n",
        new="""    for number, (inputs, targets) in enumerate(list(micro_batches), start=1):
        if number == 3:
            micro_batches.pop()
""",
        idea="train_step has changed the list of micro-batches, which its caller still needs: it had 3 of them,",
    ),
    "accumulate: the last loss divided": Wrong(
        "accumulate",
        old="(loss / len(micro_batches))",
        new="(loss / (3 if last else 1))",
        idea="only the last micro-batch's loss was divided by the number of micro-batches: divide each one",
    ),
    "accumulate: sent by hand, and not divided": Wrong(
        "accumulate",
        old=BACKWARD_OF_EACH,
        new=SENT_BY_HAND,
        idea="the gradients are the sums over the ranks: divide them by the world size",
    ),
    "accumulate: sent by hand each time": Wrong(
        "accumulate",
        old=BACKWARD_OF_EACH,
        new=f"""{BACKWARD_IN_NO_SYNC}
        import torch.distributed as dist

        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
""",
        idea="gradients were not sent once in each step by dist.all_reduce: send them once, after the last backward",
    ),
    "accumulate: three micro-batches taken for granted": Wrong(
        "accumulate",
        old="len(micro_batches)).backward",
        new="3).backward",
        idea="the losses were divided by 3 in each step, and a step may have another number of micro-batches",
    ),
    "accumulate: two ranks taken for granted": Wrong(
        "accumulate",
        old=BACKWARD_OF_EACH,
        new=f"{SENT_BY_HAND}        parameter.grad /= 2\n",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "accumulate: the third micro-batch is the last": Wrong(
        "accumulate",
        old="number == len(micro_batches)",
        new="number == 3",
        idea="in step 2, which has 2 micro-batches and not 3, DDP has sent no gradient",
    ),
    "accumulate: divided by the samples": Wrong(
        "accumulate",
        old="len(micro_batches)).backward",
        new="len(inputs)).backward",
        idea="the losses were divided by the number of samples in a micro-batch, which mse_loss has done",
    ),
    "accumulate: no_sync that is not called": Wrong(
        "accumulate",
        old="model.no_sync()",
        new="model.no_sync",
        idea="\n    without parentheses a method is not called",
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
    "exact_evaluation: the result of all_reduce": Wrong(
        "exact_evaluation",
        old="    dist.all_reduce(counts)",
        new="    counts = dist.all_reduce(counts)",
        idea="all_reduce puts the sum into the tensor that it is given, and returns None",
    ),
    "exact_evaluation: a rank without samples does not answer": Wrong(
        "exact_evaluation",
        old="    counts = torch.zeros",
        new="    if not own:\n        return 0.0\n    counts = torch.zeros",
        idea="with 3 samples on 7 ranks, so that some ranks have none, a rank has returned, and does not answer",
    ),
    "exact_evaluation: the accuracy of the own share": Wrong(
        "exact_evaluation",
        old="    dist.all_reduce(counts)\n    return (counts[0] / counts[1]).item()",
        new="    return counts[0].item() / len(own)",
        idea="100 samples on 7 ranks: the ranks return different numbers",
    ),
    "exact_evaluation: a tensor": Wrong(
        "exact_evaluation",
        old="(counts[0] / counts[1]).item()",
        new="counts[0] / counts[1]",
        idea="accuracy returns a number on every rank; these are what came:\n    rank 0: a Tensor, of which .item()",
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
    "exact_evaluation: only rank 0 returns a number": Wrong(
        "exact_evaluation",
        old="    return (counts[0] / counts[1]).item()",
        new="    return (counts[0] / counts[1]).item() if dist.get_rank() == 0 else None",
        idea="accuracy returns a number on every rank; these are what came:\n    rank 0: 0.66\n    rank 1: None",
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
    "exact_evaluation: no batch": Wrong(
        "exact_evaluation",
        old="model(image[None])",
        new="model(image)",
        idea="\n    the network takes a batch: image[None] makes one of a single image",
    ),
    "exact_evaluation: the largest of the batch": Wrong(
        "exact_evaluation",
        old="argmax(dim=1)",
        new="argmax(dim=0)",
        idea="\n    argmax(dim=1) has one entry for each sample of the batch",
    ),
    "exact_evaluation: numbers that are no tensor": Wrong(
        "exact_evaluation",
        old="torch.zeros(2, dtype=torch.float64)",
        new="[0, 0]",
        idea="\n    a collective takes a tensor; torch.tensor(number) makes one of a number",
    ),
    "exact_evaluation: not waited for": Wrong(
        "exact_evaluation",
        old="dist.all_reduce(counts)",
        new="dist.all_reduce(counts, async_op=True)",
        idea="rank 0 has not called wait() on these handles: [all_reduce]",
    ),
    "exact_evaluation: the rank on one machine": Wrong(
        "exact_evaluation",
        old="dist.get_rank()",
        new='int(__import__("os").environ["LOCAL_RANK"])',
        idea="LOCAL_RANK and LOCAL_WORLD_SIZE count the ranks of one machine",
    ),
    "exact_evaluation: no batch, and its only dimension": Wrong(
        "exact_evaluation",
        old="image[None]).argmax(dim=1)",
        new="image).argmax(dim=0)",
        idea="the network takes a batch: image[None] makes one of a single image",
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
    "overlapped_ddp: a blocking all-reduce's result kept": Wrong(
        "overlapped_ddp",
        old=", async_op=True",
        new="",
        idea="all_reduce returned None and no handle: without async_op=True it makes backward wait",
    ),
    "overlapped_ddp: a hook waits": Wrong(
        "overlapped_ddp",
        old="self.handles.append(dist.all_reduce(parameter.grad, async_op=True))",
        new="dist.all_reduce(parameter.grad, async_op=True).wait()",
        idea="4 of 6 handles were waited for while backward had gradients still to compute",
    ),
    "overlapped_ddp: handles kept with their parameters": Wrong(
        "overlapped_ddp",
        old="""        parameter.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
""",
        new="""        self.handles.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def wait(self) -> None:
        for parameter, handle in self.handles:
            handle.wait()
            parameter.grad /= dist.get_world_size()
""",
        idea="3 of 6 handles were waited for again in the next step: forget the handles",
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
    "overlapped_ddp: the loop's variable in a lambda": Wrong(
        "overlapped_ddp",
        old="register_post_accumulate_grad_hook(self.start_all_reduce)",
        new="register_post_accumulate_grad_hook(lambda _: self.start_all_reduce(parameter))",
        idea="in step 1 the gradients of the 3 layers were sent [0, 0, 3] times, and not once each: each hook is",
    ),
    "overlapped_ddp: a hook after the loop": Wrong(
        "overlapped_ddp",
        old="            parameter.register_post_accumulate_grad_hook(",
        new="        parameter.register_post_accumulate_grad_hook(",
        idea="in step 1 the gradients of the 3 layers were sent [0, 0, 1] times, and not once each: register a hook",
    ),
    "overlapped_ddp: the hook is called": Wrong(
        "overlapped_ddp",
        old="hook(self.start_all_reduce)",
        new="hook(self.start_all_reduce(parameter))",
        idea="start_all_reduce was called before any backward, when parameter.grad is None: hand the function itself",
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
    "overlapped_ddp: divided twice": Wrong(
        "overlapped_ddp",
        old="parameter.grad /= dist.get_world_size()",
        new="parameter.grad /= dist.get_world_size() ** 2",
        idea="they are divided by the world size twice",
    ),
    "overlapped_ddp: a hook of the tensor": Wrong(
        "overlapped_ddp",
        old="parameter.register_post_accumulate_grad_hook(self.start_all_reduce)",
        new="parameter.register_hook(lambda _, parameter=parameter: self.start_all_reduce(parameter))",
        idea="register_hook calls its function before backward has written parameter.grad",
    ),
    "overlapped_ddp: a hook of the tensor that gets the gradient": Wrong(
        "overlapped_ddp",
        old="register_post_accumulate_grad_hook",
        new="register_hook",
        idea="register_hook calls its function before backward has written parameter.grad",
    ),
    "overlapped_ddp: two ranks taken for granted": Wrong(
        "overlapped_ddp",
        old="dist.get_world_size()",
        new="2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "overlapped_ddp: divided by the number of handles": Wrong(
        "overlapped_ddp",
        old="""        parameter.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
""",
        new="""        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        for handle, parameter in zip(self.handles, reversed(list(self.module.parameters()))):
            handle.wait()
            parameter.grad /= len(self.handles)
""",
        idea="the sums were divided by [3, 3, 3]: divide each one once, by the world size",
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
    "overlapped_ddp: a hook of the module that passes over None": Wrong(
        "overlapped_ddp",
        old="            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)\n",
        new="""        module.register_full_backward_hook(self.start_all)

    def start_all(self, *_):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                self.start_all_reduce(parameter)
""",
        idea="no all-reduce was called: a hook has to begin one for each gradient\n    a full backward hook of a"
        " module may be called before",
    ),
    "overlapped_ddp: a hook without its parameter": Wrong(
        "overlapped_ddp",
        old="self, parameter: nn.Parameter",
        new="self",
        idea="\n    a hook is called with its parameter: start_all_reduce(self, parameter)",
    ),
    "overlapped_ddp: divided by the rank's number": Wrong(
        "overlapped_ddp",
        old="        parameter.grad /= dist.get_world_size()\n",
        new="        parameter.grad /= dist.get_rank() + 1\n",
        idea="a mean is the sum of the ranks' gradients, divided once by the world size",
    ),
    "overlapped_ddp: the beginning of a module forgotten": Wrong(
        "overlapped_ddp",
        old="        super().__init__()\n",
        new="",
        idea="\n    super().__init__() comes first in the __init__ of an nn.Module",
    ),
    "overlapped_ddp: one buffer for all": Wrong(
        "overlapped_ddp",
        old="""        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))
""",
        new="""        self.buffer = getattr(self, 'buffer', parameter.grad.clone())
        self.buffer.copy_(parameter.grad)
        self.handles.append(dist.all_reduce(self.buffer, async_op=True))
""",
        idea="all-reduces were given memory in which an earlier one was still under way",
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
    "overlapped_ddp: waited for a step later": Wrong(
        "overlapped_ddp",
        old="""        for handle in self.handles:
            handle.wait()
        self.handles.clear()
""",
        new="""        for handle in getattr(self, "earlier", []):
            handle.wait()
        self.earlier = self.handles
        self.handles = []
""",
        idea="6 of 6 all-reduces were not waited for before the optimizer's step",
    ),
    "overlapped_ddp: every other handle": Wrong(
        "overlapped_ddp",
        old="""            handle.wait()
        self.handles.clear()
""",
        new="""            handle.wait()
            self.handles.remove(handle)
""",
        idea="3 of 6 all-reduces were not waited for before the optimizer's step",
    ),
    "overlapped_ddp: a handle asked whether it is ready": Wrong(
        "overlapped_ddp",
        old="""            handle.wait()
""",
        new="""            while not handle.is_completed():
                pass
""",
        idea="a message arrives here when wait() of its handle is called",
    ),
    "overlapped_ddp: a copy of less precision": Wrong(
        "overlapped_ddp",
        old="""        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))
""",
        new="""        less = parameter.grad.half()
        handle = dist.all_reduce(less, async_op=True).get_future()
        self.handles.append(handle.then(lambda _: parameter.grad.copy_(less)))
""",
        idea="each is right to a few digits only, because it was rounded on the way",
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
    "buckets: always the first part": Wrong(
        "buckets",
        old="""        start += parameter.numel()
""",
        new="",
        idea="only a has its own part of the message",
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
    "buckets: not flattened": Wrong(
        "buckets",
        old="parameter.grad.flatten()",
        new="parameter.grad",
        idea="raised RuntimeError: Tensors must have same number of dimensions",
    ),
    "buckets: flat gradients": Wrong(
        "buckets",
        old="parameter.grad.copy_(part.view_as(parameter))",
        new="parameter.grad = part",
        idea="raised RuntimeError: attempting to assign a gradient of size '[4]' to a tensor of size '[2, 2]'",
    ),
    "buckets: flat data of gradients": Wrong(
        "buckets",
        old="parameter.grad.copy_(part.view_as(parameter))",
        new="parameter.grad.data = part",
        idea="the parameter a has the shape [2, 2], and its gradient now has [4]: view_as gives",
    ),
    "buckets: gradients cleared": Wrong(
        "buckets",
        old="parameter.grad.copy_(part.view_as(parameter))",
        new="parameter.grad = None",
        idea="average_bucket has left a parameter without a gradient",
    ),
    "buckets: the caller's list turned round": Wrong(
        "buckets",
        old="    for parameter in reversed(parameters):",
        new="""    parameters.reverse()
    for parameter in parameters:""",
        idea="fill_buckets has changed the list that it was given, which belongs to the caller",
    ),
    "buckets: the caller's list emptied": Wrong(
        "buckets",
        old="    for parameter in reversed(parameters):",
        new="""    while parameters:
        parameter = parameters.pop()""",
        idea="fill_buckets has changed the list that it was given, which belongs to the caller",
    ),
    "buckets: the caller's bucket emptied": Wrong(
        "buckets",
        old="""    for parameter in bucket:
        part""",
        new="""    while bucket:
        parameter = bucket.pop(0)
        part""",
        idea="average_bucket has changed the list that it was given, which belongs to the caller",
    ),
    "buckets: one list for all": Wrong(
        "buckets",
        old="            filling = []",
        new="            filling.clear()",
        idea="the buckets are one list several times, which has changed in all",
    ),
    "buckets: gradients in the buckets": Wrong(
        "buckets",
        old="filling.append(parameter)",
        new="filling.append(parameter.grad)",
        idea="a bucket is a list of the parameters themselves, not of their gradients",
    ),
    "buckets: the size never reset": Wrong(
        "buckets",
        old="            size = 0\n",
        new="",
        idea="and count the bytes of the next one from 0. Yours never count from 0 again",
    ),
    "buckets: the last bucket first": Wrong(
        "buckets",
        old="    return buckets",
        new="    return buckets[::-1]",
        idea="the order is not DDP's: from the last parameter to the first, in each bucket and from one to the",
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
    "buckets: divided by the number of parameters": Wrong(
        "buckets",
        old="message /= dist.get_world_size()",
        new="message /= len(bucket)",
        idea="were divided by [5, 5, 5, 5, 5]: divide the message once, by the world size",
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
    "buckets: stacked": Wrong(
        "buckets",
        old="torch.cat",
        new="torch.stack",
        idea="\n    gradients differ in size: torch.cat, and not torch.stack, puts them into one row",
    ),
    "buckets: equal parts": Wrong(
        "buckets",
        old="""    start = 0
    for parameter in bucket:
        part = message[start : start + parameter.numel()]
        parameter.grad.copy_(part.view_as(parameter))
        start += parameter.numel()
""",
        new="""    for parameter, part in zip(bucket, message.chunk(len(bucket))):
        parameter.grad.copy_(part.view_as(parameter))
""",
        idea="\n    a gradient's part of the message has parameter.numel() numbers, and begins where the part"
        " before it ends",
    ),
    "buckets: copied without a shape": Wrong(
        "buckets",
        old="part.view_as(parameter)",
        new="part",
        idea="\n    view_as(parameter) gives a part of the message the shape of its parameter",
    ),
    "buckets: bytes of gradients that are not there": Wrong(
        "buckets",
        old="parameter.nbytes",
        new="parameter.grad.nbytes",
        idea="\n    before the first backward parameter.grad is None: the parameter has as many bytes",
    ),
    "buckets: the mean of the message": Wrong(
        "buckets",
        old="message /= dist.get_world_size()",
        new="message = message.mean()",
        idea="Tensor.mean is that of one rank's numbers",
    ),
    "buckets: a sum for rank 0": Wrong(
        "buckets",
        old="dist.all_reduce(message)",
        new="dist.reduce(message, 0)",
        idea="average_bucket has called no all_reduce, which gives the sum to all ranks",
    ),
    "buckets: the sum is put back": Wrong(
        "buckets",
        old="message /= dist.get_world_size()",
        new="mean = message / dist.get_world_size()",
        idea="they are the sums over the ranks: put back what is divided by the world size",
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
    "buckets: what is too much is carried over": Wrong(
        "buckets",
        old="""            size = 0
    if""",
        new="""            size -= capacity
    if""",
        idea="count the bytes of the next one from 0",
    ),
    "buckets: a message of less precision": Wrong(
        "buckets",
        old="""    dist.all_reduce(message)
""",
        new="""    message = message.half()
    dist.all_reduce(message)
""",
        idea="each is right to a few digits only, because it was rounded on the way",
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
    "ring_all_reduce: a collective of objects": Wrong(
        "ring_all_reduce",
        old="    chunks = tensor",
        new="""    numbers = [tensor]
    dist.broadcast_object_list(numbers)
    chunks = tensor""",
        idea="dist.broadcast_object_list was called",
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
        idea="Both have to mean the same chunk, and chunks need not be equally large",
    ),
    "ring_all_reduce: the rest in another chunk on one rank": Wrong(
        "ring_all_reduce",
        old="chunks = tensor.tensor_split(world_size)",
        new="""rest = len(tensor) - 4
    chunks = tensor.split([2, 2, rest] if rank == 2 else [rest, 2, 2])""",
        idea="Both have to mean the same chunk, and chunks need not be equally large",
    ),
    "ring_all_reduce: the whole tensor into a chunk": Wrong(
        "ring_all_reduce",
        old="handle = dist.isend(chunks[(rank - step) % world_size], right)",
        new="handle = dist.isend(tensor, right)",
        idea=", which has room for 2 (message 1 from rank",
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
    "ring_all_reduce: from the right neighbour": Wrong(
        "ring_all_reduce",
        old="    left = (rank - 1) % world_size",
        new="    left = right",
        idea="rank 0 receives from rank 1: in a ring each rank receives from its left neighbour only",
    ),
    "ring_all_reduce: from rank -1": Wrong(
        "ring_all_reduce",
        old="    left = (rank - 1) % world_size",
        new="    left = rank - 1",
        idea="rank 0 receives from rank -1: in a ring each rank receives from its left neighbour only",
    ),
    "ring_all_reduce: handles of sends forgotten": Wrong(
        "ring_all_reduce",
        old="        handle.wait()\n",
        new="",
        idea="has not called wait() on these handles: [isend, isend, isend, isend]",
    ),
    "ring_all_reduce: handles of receives forgotten": Wrong(
        "ring_all_reduce",
        old="        dist.recv(arrived, left)\n",
        new="        dist.irecv(arrived, left)\n",
        idea="has not called wait() on these handles: [irecv, irecv]",
    ),
    "ring_all_reduce: a step too few": Wrong(
        "ring_all_reduce",
        old="for step in range(world_size - 1):\n        handle = dist.isend(chunks[(rank + 1",
        new="for step in range(world_size - 2):\n        handle = dist.isend(chunks[(rank + 1",
        idea="each half of the ring has W - 1 steps, so that a rank sends 4 chunks in all; these ranks have sent [3, 3",
    ),
    "ring_all_reduce: a step too many in each half": Wrong(
        "ring_all_reduce",
        old="for step in range(world_size - 1):",
        new="for step in range(world_size):",
        idea="cut the 6 numbers into 3 chunks, and send one chunk in each of the 4 steps",
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
    "ring_all_reduce: room of another dtype": Wrong(
        "ring_all_reduce",
        old="torch.empty_like(mine)",
        new="torch.empty(len(mine))",
        idea=", which has room for torch.float32 (message 1 from rank",
    ),
    "ring_all_reduce: a rank that takes no part": Wrong(
        "ring_all_reduce",
        old="    right = (rank + 1) % world_size",
        new="    if rank == 0:\n        return\n    right = (rank + 1) % world_size",
        idea="each message has to be sent by one rank and received by its right neighbour, equally often on all ranks",
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
    "ring_all_reduce: chunks of as good as equal sizes": Wrong(
        "ring_all_reduce",
        old="tensor_split",
        new="chunk",
        idea="7 numbers on 3 ranks: the sums are right, but the chunks differ by more than one number: tensor_split",
    ),
    "ring_all_reduce: chunks that are too small": Wrong(
        "ring_all_reduce",
        old="tensor.tensor_split(world_size)",
        new="tensor.split(len(tensor) // world_size)",
        idea="the chunks are too small, so that the last numbers are in none of them: 7 numbers have chunks of"
        " [3, 2, 2]",
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
    "ring_all_reduce: the own chunk under another name": Wrong(
        "ring_all_reduce",
        old="torch.empty_like(mine)",
        new="mine",
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
    "ring_all_reduce: the own chunk in each step": Wrong(
        "ring_all_reduce",
        old="(rank - step) % world_size], right",
        new="rank], right",
        idea="no sum was passed on in the first half",
    ),
    "ring_all_reduce: all chunks in a message": Wrong(
        "ring_all_reduce",
        old="chunks[(rank - step) % world_size], right",
        new="chunks, right",
        idea="isend was given a tuple: a message is one tensor, such as one of the chunks",
    ),
    "ring_all_reduce: the second half begins one chunk too low": Wrong(
        "ring_all_reduce",
        old="(rank + 1 - step)",
        new="(rank - 1 - step)",
        idea="no chunk is finished after the first half, or another one was sent as the first of the second half",
    ),
    "ring_all_reduce: a step too few in each half": Wrong(
        "ring_all_reduce",
        old="range(world_size - 1)",
        new="range(world_size - 2)",
        idea="so that a rank sends 4 chunks in all; these ranks have sent [2, 2, 2]",
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
    "sampler: the global generator seeded": Wrong(
        "sampler",
        old="generator = torch.Generator().manual_seed(self.seed + self.epoch)",
        new="generator = torch.manual_seed(self.seed + self.epoch)",
        idea="draw the order from a new torch.Generator, and hand it to torch.randperm",
    ),
    "sampler: the samples themselves": Wrong(
        "sampler",
        old="        return iter(order",
        new="        order = [self.dataset[index] for index in order]\n        return iter(order",
        idea="(Tensor.tolist() makes them of a tensor), and not the samples",
    ),
    "sampler: a list for an iterator": Wrong(
        "sampler",
        old="return iter(",
        new="return list(",
        idea="__iter__ returned a list, of which there is no next one: return iter(...) of it",
    ),
    "sampler: a generator in set_epoch only": Wrong(
        "sampler",
        old="""        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
""",
        new="""        self.generator = torch.Generator().manual_seed(self.seed + epoch)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=self.generator).tolist()
""",
        idea="\n    This was before set_epoch was called, in epoch 0.",
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
    "sampler: counts the epochs itself": Wrong(
        "sampler",
        old="        return iter(order",
        new="        self.epoch += 1\n        return iter(order",
        idea="epoch 0: list(sampler) gives something else the second time",
    ),
    "sampler: one iterator for all": Wrong(
        "sampler",
        old="        return iter(order[self.rank :: self.world_size])",
        new="""        if not hasattr(self, "order"):
            self.order = iter(order[self.rank :: self.world_size])
        return self.order""",
        idea="epoch 0: list(sampler) gives something else the second time",
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
    "sampler: ranks counted from 1": Wrong(
        "sampler",
        old="order[self.rank :: self.world_size]",
        new="order[self.rank + 1 :: self.world_size]",
        idea=", at the positions [0] of the order, are dealt out to nobody: rank 0 begins at position 0",
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
    "sampler: epochs added up": Wrong(
        "sampler",
        old="        self.epoch = epoch",
        new="        self.epoch += epoch",
        idea="epoch 2: the order is that of epoch 3: set_epoch(epoch) says which epoch it is",
    ),
    "sampler: an iterator without an end": Wrong(
        "sampler",
        old="        return iter(order[self.rank :: self.world_size])",
        new="""        self.left = order[self.rank :: self.world_size]
        return self

    def __next__(self):
        return self.left.pop(0)""",
        idea="\n    an iterator ends by StopIteration, as that of iter(list) does",
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
    "zero1: rank 0's for all": Wrong(
        "zero1",
        old="src=number % dist.get_world_size()",
        new="src=0",
        idea="in step 1 some parameters have moved on no rank",
    ),
    "zero1: everything on every rank": Wrong(
        "zero1",
        old="[dist.get_rank() :: dist.get_world_size()]",
        new="",
        idea="every rank keeps the optimizer's state of all parameters, as under DDP, so no memory is saved: give each"
        " rank's AdamW this rank's part of the parameters only; numbers in the state:\n    rank 0: 30\n    rank 1: 30",
    ),
    "zero1: a part that is too large": Wrong(
        "zero1",
        old="self.parameters[dist.get_rank() :: dist.get_world_size()]",
        new="self.parameters[dist.get_rank() :]",
        idea="a rank keeps more than its part of the optimizer's state",
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
    "zero1: divided twice": Wrong(
        "zero1",
        old="            dist.all_reduce(parameter.grad)",
        new="""            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)""",
        idea="they are divided by the world size twice",
    ),
    "zero1: not added up": Wrong(
        "zero1",
        old="            dist.all_reduce(parameter.grad)\n",
        new="",
        idea="they are each rank's own, divided by the world size: add them up over the ranks too",
    ),
    "zero1: old gradients kept": Wrong(
        "zero1",
        old="parameter.grad = None",
        new="pass",
        idea="those of the step before are still in them: zero_grad() has to clear them",
    ),
    "zero1: old gradients kept by those that do not step with them": Wrong(
        "zero1",
        old="            parameter.grad = None",
        new="            pass\n        self.optimizer.zero_grad()",
        idea="zero_grad() has to clear the gradients of all parameters, on every rank",
    ),
    "zero1: a copy is stepped": Wrong(
        "zero1",
        old="        self.optimizer = torch.optim.AdamW(own, **settings)",
        new="""        own = [nn.Parameter(parameter.detach().clone()) for parameter in own]
        self.optimizer = torch.optim.AdamW(own, **settings)""",
        idea="an AdamW made a step without gradients",
    ),
    "zero1: a copy is stepped with gradients, and not put back": Wrong(
        "zero1",
        old="""        self.optimizer = torch.optim.AdamW(own, **settings)

    def step(self) -> None:
""",
        new="""        self.copies = [nn.Parameter(parameter.detach().clone()) for parameter in own]
        self.optimizer = torch.optim.AdamW(self.copies, **settings)

    def step(self) -> None:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
        for copy, parameter in zip(self.copies, self.parameters[dist.get_rank() :: dist.get_world_size()]):
            copy.grad = parameter.grad / dist.get_world_size()
        self.optimizer.step()
        return
""",
        idea="in step 1 the weights have not moved",
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
    "zero1: unequal parts": Wrong(
        "zero1",
        old="            dist.all_reduce(parameter.grad)",
        new="            dist.reduce_scatter_tensor(parameter.grad.flatten()[:1], parameter.grad.flatten())",
        idea="\n    3 numbers have no 2 equal parts: fill them up with zeros first",
    ),
    "zero1: two ranks taken for granted": Wrong(
        "zero1",
        old="dist.get_world_size()",
        new="2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "zero1: a mean over two ranks": Wrong(
        "zero1",
        old="parameter.grad /= dist.get_world_size()",
        new="parameter.grad /= 2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "zero1: parameters that are no list": Wrong(
        "zero1",
        old="list(module.parameters())",
        new="module.parameters()",
        idea="\n    model.parameters() can be gone through once, and not indexed: make a list of it",
    ),
    "zero1: Adam": Wrong(
        "zero1",
        old="torch.optim.AdamW",
        new="torch.optim.Adam",
        idea="the steps were made by Adam, and not by AdamW",
    ),
    "zero1: weights averaged": Wrong(
        "zero1",
        old="            dist.broadcast(parameter.detach(), src=number % dist.get_world_size())",
        new="            dist.all_reduce(parameter.detach(), op=dist.ReduceOp.AVG)",
        idea="each weight is the mean of its owner's new number and the old ones of the other ranks",
    ),
    "zero1: the module itself": Wrong(
        "zero1",
        old="AdamW(own",
        new="AdamW(module",
        idea="\n    AdamW takes a list of parameters, this rank's part of list(module.parameters())",
    ),
    "zero1: the settings in one argument": Wrong(
        "zero1",
        old="""**settings)

    def step""",
        new="""settings)

    def step""",
        idea="\n    **settings hands the settings on by their names, such as lr=0.1",
    ),
    "zero1: broadcasts not waited for": Wrong(
        "zero1",
        old="""% dist.get_world_size())

    def zero""",
        new="""% dist.get_world_size(), async_op=True)

    def zero""",
        idea="rank 0 has not called wait() on these handles: [broadcast, broadcast, broadcast",
    ),
    "zero1: a parameter changed in place": Wrong(
        "zero1",
        old="dist.broadcast(parameter.detach(), src=number % dist.get_world_size())",
        new="parameter += 0",
        idea="\n    change a parameter under torch.no_grad(), or as parameter.detach()",
    ),
    "zero1: equal parts in room of another dtype": Wrong(
        "zero1",
        old="""        for number, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.detach(), src=number % dist.get_world_size())
""",
        new="""        for parameter in self.parameters:
            room = torch.empty(dist.get_world_size() * parameter.numel())
            dist.all_gather_into_tensor(room, parameter.detach().flatten())
""",
        idea="the tensors of a collective have one dtype, here that of the parameters",
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
    "loss_scaler: skipped if all overflow": Wrong(
        "loss_scaler",
        old="dist.all_reduce(overflows)",
        new="dist.all_reduce(overflows, op=dist.ReduceOp.MIN)",
        idea="in step 2 rank 1 made the step, although a gradient of its part had overflowed",
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
    "loss_scaler: doubled in every step from then on": Wrong(
        "loss_scaler",
        old="            self.factor *= 2\n            self.steps_in_a_row = 0\n",
        new="            self.factor *= 2\n            self.steps_in_a_row = 1\n",
        idea="in step 8 the scale stays: the steps in a row are counted anew after an overflow, and after",
    ),
    "loss_scaler: an overflow is never forgotten": Wrong(
        "loss_scaler",
        old="self.was_skipped = overflows.item() > 0",
        new="self.was_skipped = self.was_skipped or overflows.item() > 0",
        idea="in step 3 a rank skipped the step, although no gradient of any rank is inf or nan",
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
    "loss_scaler: the loss itself is multiplied": Wrong(
        "loss_scaler",
        old="return loss * self.factor",
        new="loss *= self.factor\n        return loss",
        idea="in step 1 scale(loss) has changed the loss itself, which a training loop goes on to log",
    ),
    "loss_scaler: two ranks taken for granted": Wrong(
        "loss_scaler",
        old="        dist.all_reduce(overflows)\n",
        new="""        flags = [torch.zeros(()), torch.zeros(())]
        dist.all_gather(flags, overflows)
        overflows = sum(flags)
""",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "loss_scaler: doubled by every second step": Wrong(
        "loss_scaler",
        old="self.steps_in_a_row == self.growth_interval",
        new="self.steps_in_a_row == 2",
        idea="with scale=513.0 and growth_interval=3, in step 4 the scale stays",
    ),
    "loss_scaler: a scale of its own": Wrong(
        "loss_scaler",
        old="self.factor = scale",
        new="self.factor = 1024.0",
        idea="with scale=513.0 and growth_interval=3, in step 1 scale(loss) did not return the loss times the scale",
    ),
    "loss_scaler: no gradients for inf": Wrong(
        "loss_scaler",
        old="""        if not self.was_skipped:
            optimizer.step()""",
        new="""        if self.was_skipped:
            optimizer.zero_grad()
        optimizer.step()""",
        idea="optimizer.step() was called with other numbers in place of inf or nan, or with none",
    ),
    "loss_scaler: a number of the name of a method": Wrong(
        "loss_scaler",
        old="self.factor",
        new="self.scale",
        idea="\n    scale, step and update are methods: keep a number under a name of its own",
    ),
    "loss_scaler: not waited for": Wrong(
        "loss_scaler",
        old="dist.all_reduce(overflows)",
        new="dist.all_reduce(overflows, async_op=True)",
        idea="rank 0 has not called wait() on these handles: [all_reduce",
    ),
    "loss_scaler: counted on after the scale was doubled": Wrong(
        "loss_scaler",
        old="""            self.factor *= 2
            self.steps_in_a_row = 0
""",
        new="""            self.factor *= 2
""",
        idea="in step 9 the second step in a row without an overflow (growth_interval=2) doubles the scale, and then"
        " they are counted anew",
    ),
    "loss_scaler: halved down to a whole number": Wrong(
        "loss_scaler",
        old="self.factor /= 2",
        new="self.factor //= 2",
        idea="half of the scale may be no whole number: // rounds it down",
    ),
    "loss_scaler: halved twice": Wrong(
        "loss_scaler",
        old="self.factor /= 2",
        new="self.factor /= 4",
        idea="an overflow halves the scale once: only update() changes it",
    ),
    "loss_scaler: averaged once more": Wrong(
        "loss_scaler",
        old="parameter.grad /= self.factor",
        new="parameter.grad /= self.factor * dist.get_world_size()",
        idea="they are divided by the number of ranks too, but they are averaged already",
    ),
    "loss_scaler: a new loss": Wrong(
        "loss_scaler",
        old="return loss * self.factor",
        new="return torch.tensor(loss.item() * self.factor, requires_grad=True)",
        idea="no gradient has come: scale(loss) has to return a tensor from which backward reaches the parameters",
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
    "prepare: a new optimizer with the same learning rate": Wrong(
        "prepare",
        old="    return obj\n",
        new="    return type(obj)(obj.param_groups[0]['params'], lr=obj.param_groups[0]['lr'])\n",
        idea="the optimizer that came back is another one than was given, without its settings and its state",
    ),
    "prepare: the learning rate times the ranks": Wrong(
        "prepare",
        old="    return obj\n",
        new="    obj.param_groups[0]['lr'] *= dist.get_world_size()\n    return obj\n",
        idea="the optimizer that came back has another learning rate. It needs no change",
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
    "prepare: a tuple": Wrong(
        "prepare",
        old="return [prepare_one(obj) for obj in objects]",
        new="return tuple(prepare_one(obj) for obj in objects)",
        idea="it returned tuple, and not a list",
    ),
    "prepare: an object for a list of one": Wrong(
        "prepare",
        old="return [prepare_one(obj) for obj in objects]",
        new="found = [prepare_one(obj) for obj in objects]\n    return found if len(found) > 1 else found[0]",
        idea="prepare was given DataLoader; it returned DataLoader, and not a list",
    ),
    "prepare: the network first": Wrong(
        "prepare",
        old="return [prepare_one(obj) for obj in objects]",
        new="return sorted(map(prepare_one, objects), key=lambda obj: not isinstance(obj, nn.Module))",
        idea="it returned DistributedDataParallel, DataLoader, SGD, DataLoader: each object belongs to the place",
    ),
    "prepare: all samples on every rank": Wrong(
        "prepare",
        old="    if isinstance(obj, DataLoader):",
        new="    if False:",
        idea="every rank has all samples of a batch, so all compute the same",
    ),
    "prepare: no sampler": Wrong(
        "prepare",
        old="            sampler=DistributedSampler(obj.dataset, shuffle=shuffle),\n",
        new="",
        idea="every rank goes through all samples: a sampler has to deal them out",
    ),
    "prepare: each rank shuffles a part of its own": Wrong(
        "prepare",
        old="""        return DataLoader(
            obj.dataset,
            batch_size=obj.batch_size // dist.get_world_size(),
            sampler=DistributedSampler(obj.dataset, shuffle=shuffle),
""",
        new="""        own = range(dist.get_rank(), len(obj.dataset), dist.get_world_size())
        return DataLoader(
            __import__("torch").utils.data.Subset(obj.dataset, own),
            batch_size=obj.batch_size // dist.get_world_size(),
            shuffle=shuffle,
""",
        idea="each rank has the same samples with a loader that shuffles as with one that does not",
    ),
    "prepare: the network without its DDP": Wrong(
        "prepare",
        old="return DistributedDataParallel(obj)",
        new="return DistributedDataParallel(obj).module",
        idea="DDP averages them, and what came back is a Linear",
    ),
    "prepare: the batch size of all ranks on each": Wrong(
        "prepare",
        old="obj.batch_size // dist.get_world_size()",
        new="obj.batch_size",
        idea="a step takes 12 samples, and an epoch has fewer steps",
    ),
    "prepare: halves of the dataset": Wrong(
        "prepare",
        old="sampler=DistributedSampler(obj.dataset, shuffle=shuffle)",
        new="sampler=range(9 * dist.get_rank(), 9 * dist.get_rank() + 9)",
        idea="in each step the ranks together do not have the samples of one batch",
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
    "prepare: a rank has a batch more": Wrong(
        "prepare",
        old="sampler=DistributedSampler(obj.dataset, shuffle=shuffle)",
        new="sampler=[0, 1] if dist.get_rank() else [2, 3, 4, 5]",
        idea="a rank had fewer batches than another one, which waits for it in backward",
    ),
    "prepare: two ranks taken for granted": Wrong(
        "prepare",
        old="// dist.get_world_size()",
        new="// 2",
        idea="on 3 ranks, after all was right on 2: the number of ranks is dist.get_world_size()",
    ),
    "prepare: a batch's parts are cut": Wrong(
        "prepare",
        old="        return DataLoader(\n",
        new="""        rank = dist.get_rank()
        return ([part[rank :: dist.get_world_size()] for part in batch] for batch in obj)
        return DataLoader(
""",
        idea="a batch is ['a str', 'a str', 'a str'], which was made of a batch of the loader. What its"
        " collate_fn makes, here a dict, can be of any kind",
    ),
    "prepare: a batch is cut": Wrong(
        "prepare",
        old="        return DataLoader(\n",
        new="""        return (batch[dist.get_rank() :: dist.get_world_size()] for batch in obj)
        return DataLoader(
""",
        idea="share out the numbers of the samples, by a sampler, before they become a batch",
    ),
    "prepare: the whole dataset in a list": Wrong(
        "prepare",
        old="""            obj.dataset,
            batch_size=obj.batch_size // dist.get_world_size(),
            sampler=DistributedSampler(obj.dataset, shuffle=shuffle),
""",
        new="""            list(obj.dataset)[dist.get_rank() :: dist.get_world_size()],
            batch_size=obj.batch_size // dist.get_world_size(),
            shuffle=shuffle,
""",
        idea="it has read others from the dataset too, and thrown them away: choose the numbers of the samples before",
    ),
    "prepare: whole batches in turn": Wrong(
        "prepare",
        old="        return DataLoader(\n",
        new="""        return list(obj)[dist.get_rank() :: dist.get_world_size()]
        return DataLoader(
""",
        idea="each rank has whole batches of the original loader, so that a step takes as many samples as"
        " several of them: share out each batch",
    ),
    "prepare: devices of GPUs": Wrong(
        "prepare",
        old="DistributedDataParallel(obj)",
        new="DistributedDataParallel(obj, device_ids=[dist.get_rank()])",
        idea="\n    this network is on the CPU, and device_ids are those of GPUs: leave them out",
    ),
    "prepare: the loader's shuffle": Wrong(
        "prepare",
        old="shuffle=shuffle",
        new="shuffle=obj.shuffle",
        idea="\n    a DataLoader that shuffles has a RandomSampler as its `sampler`, and no `shuffle`",
    ),
    "prepare: another sampler for the same loader": Wrong(
        "prepare",
        old="        return DataLoader(\n",
        new="""        obj.sampler = DistributedSampler(obj.dataset, shuffle=shuffle)
        return DataLoader(
""",
        idea="\n    a DataLoader keeps what it was made of: make a new one",
    ),
    "prepare: a sampler, and shuffle": Wrong(
        "prepare",
        old="            collate_fn=",
        new="""            shuffle=shuffle,
            collate_fn=""",
        idea="\n    the sampler shuffles, DistributedSampler(dataset, shuffle=True): the loader of such a"
        " sampler has no shuffle",
    ),
    "prepare: a batch size that is no whole number": Wrong(
        "prepare",
        old="// dist",
        new="/ dist",
        idea="\n    batch_size // world size is a whole number, and with / it is none",
    ),
    "prepare: rank 0's share for all": Wrong(
        "prepare",
        old="DistributedSampler(obj.dataset,",
        new="DistributedSampler(obj.dataset, dist.get_world_size(), 0,",
        idea="all ranks have the same samples: the share of each begins with its own number, dist.get_rank()",
    ),
    "prepare: no batch size": Wrong(
        "prepare",
        old="            batch_size=obj.batch_size // dist.get_world_size(),\n",
        new="",
        idea="a step takes 2 samples, and a batch of the original loader has 6: of them a rank has batch_size //"
        " world size",
    ),
}
