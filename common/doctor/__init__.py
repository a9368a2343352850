"""The doctor: somebody's training script, run on several processes and examined for the mistakes of common/pitfalls.

    python -m common.doctor my_train.py --epochs 2

`launch` starts `run_script` for each rank, as torchrun would start the script. `run_script` calls `watch` of the
modules below, and then runs the script. The observers fill a `Record`, which the rank leaves in a file. When all ranks
have ended, or hang, `report` asks the checks, each of which compares the records of all ranks and returns an `Answer`.

    module            observes                by                                    its checks
    data              samples, epochs         wrappers of a DataLoader's iterator   orders, evaluation_samples
    shards                                                                          training_samples, data_sets
    networks          forwards, weights       torch's hooks for all modules,        weights, batchnorm
                                              a wrapper of DDP.__init__
    random_numbers                                                                  draws
    optimizers        steps, their rates      torch's hooks for all optimizers      parameters, learning_rates,
                      loss scaling            wrappers of GradScaler, clip_grad…    schedule, clipping, accumulation
    files             saved files             a wrapper of torch.save               writers, keys
    end               collectives             wrappers of torch.distributed         end
    heartbeat         the script's line       a thread that looks every 0.2 s

A wrapper (`Recorder.watch`) calls the original and changes neither its arguments nor its result. torch has no hook for
DataLoaders, so `data` wraps the methods of the private class `_BaseDataLoaderIter`; a torch that renames them makes the
start fail at once, and not the findings wrong. The process ends with the script, so nothing is taken out of torch.
"""
