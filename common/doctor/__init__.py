"""The doctor: somebody's training script, run on several processes and examined for the mistakes of common/pitfalls.

    python -m common.doctor my_train.py --epochs 2

`launch` starts `run_script` for each rank, as torchrun would start the script. `run_script` installs observers and then
runs the script. The observers fill a `Record`, which the rank leaves in a file. When all ranks have ended, or hang,
`report` gives the records of all ranks to the checks, each of which compares them and returns an `Answer`.

    observer            it watches          by                                          for the checks
    watch_networks      forwards, weights   torch's hooks for all modules               compare_networks
                        wrapping            a wrapper of DDP.__init__                   compare_networks
    watch_optimizers    steps, their rates  torch's hooks for all optimizers            compare_optimizers
    watch_scalers       loss scaling        wrappers of GradScaler's methods,           compare_optimizers
                                            clip_grad_norm_ and clip_grad_value_
    watch_data          samples, epochs     wrappers of a DataLoader's iterator         compare_data
    watch_calls         collectives         wrappers of torch.distributed's functions   compare_end
                        saved files         a wrapper of torch.save                     compare_files
    heartbeat           the script's line   a thread that looks every 0.2 s             compare_end

A wrapper (`Watcher.watch`) calls the original and changes neither its arguments nor its result. torch has no hook for
DataLoaders, so `watch_data` wraps the methods of the private class `_BaseDataLoaderIter`; a torch that renames them
makes the installation fail at once, and not the findings wrong.
"""
