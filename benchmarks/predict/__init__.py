"""A prediction, not a measurement: what data-parallel training on many GPUs gains, and from which batch on."""
