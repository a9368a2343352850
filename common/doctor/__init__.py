"""The doctor: somebody's training script, run on several processes and examined for the mistakes of common/pitfalls.

    python -m common.doctor my_train.py --epochs 2

`launch` starts `run_script` for each rank, as torchrun would start the script. `run_script` calls `watch` of the
modules below, and then runs the script. The observers fill a `Record`, which the rank leaves in a file. When all ranks
have ended, or hang, `report` asks the checks, each of which compares the records of all ranks and returns an `Answer`.
Those of `steps` look at rank 0 alone.

    observer    of what                    by
    data        samples and epochs         wrappers of a DataLoader's iterator
    networks    forwards and weights       torch's hooks for all modules, a wrapper of DDP.__init__
    optimizers  steps and their rates      torch's hooks for all optimizers
    steps       loss scaling, clippings    wrappers of GradScaler and of clip_grad_…
    files       saved files                a wrapper of torch.save
    end         collectives                wrappers of torch.distributed
    heartbeat   the script's line          a thread that looks every 0.2 s

    checks in       compare what was observed by   and ask for
    data            data                           the order of each epoch, and the samples of an evaluation
    shards          data                           the samples of a training
    replicas        networks                       equal weights and BatchNorm statistics
    random_numbers  networks, data                 different random numbers
    optimizers      optimizers                     the networks' parameters, and equal learning rates
    steps           optimizers, steps              schedule, clipping and accumulation
    files           files                          one writer, and its keys
    end             all of them                    the reason of a bad end

A wrapper (`Recorder.watch`) calls the original and changes neither its arguments nor its result. torch has no hook for
DataLoaders, so `data` wraps the methods of the private class `_BaseDataLoaderIter`; a torch that renames them makes the
start fail at once, and not the findings wrong. The process ends with the script, so nothing is taken out of torch.
"""
