"""Steps that are recorded as lanes of spans: what each device computes, and each of gloo's threads sends.

spans                 a span, a recorded step, and what one computes from them
record_steps          records the steps of a process by torch's profiler
record_level          steps of a level's own script
gradient_averaging    steps of two ranks that average their gradients
typical_steps         rows of recorded steps take turns; a typical step of each is kept
"""
