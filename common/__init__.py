"""What the ladder shares. Of the modules that lie directly in here, a run meets these first, in this order:

    args → settings → start         flags are parsed; what they leave open is decided; the process is set up
    data → model → eval_sampler     what is trained, and who evaluates which sample

The others know nothing of training, and stand below everything: errors, files, launch, process_group, processes, …
"""
