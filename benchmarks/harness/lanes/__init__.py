"""Steps that are recorded thread by thread, as lanes of spans.

spans                 a span, a recorded step, and what one computes from them
record_steps          records the steps of a process by torch's profiler
gradient_averaging    steps of two ranks, by several ways to average gradients
record_level          steps of a level's own script
typical_steps         rows of recorded steps take turns; a typical step of each is kept
"""
