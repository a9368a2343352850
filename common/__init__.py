"""What the ladder shares. A run meets these modules and the package data first, in this order:

    args → settings → start         flags are parsed; what they leave open is decided; the process is set up
    data → model → eval_sampler     what is trained, and who evaluates which sample

Of the others, test_imports lists as BASE those on which any room may stand, such as errors, files and launch.
"""
