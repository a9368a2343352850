"""Files with gaps, to begin an exercise with. The docstring is the task."""
