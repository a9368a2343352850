"""Steps that are recorded thread by thread, as lanes of spans.

spans                 a span, a recorded step, and what one computes from them
profiler_events       what torch's profiler saw
gradient_averaging    a step of two ranks, by several ways to average gradients
record_averaging      record such steps, which name their phases
record_level          record steps of a level's own script, which does not
typical_steps         rows of recorded steps take turns; a typical step of each is kept
"""
