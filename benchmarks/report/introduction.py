"""The introduction to a comparison: its levels, and what to expect of them on this machine."""

from benchmarks.harness.load import what_is_slowed
from benchmarks.report.wrapping import wrapped


def introduction(report: dict) -> str:
    """The runs ahead, and what to expect of them."""
    machine = report["machine"]
    hardware = ", ".join(machine["gpus"]) or "no GPU"
    what = (
        f"torch {machine['torch']}, {machine['cores']} CPU cores, {hardware}. "
        f"Every level: global batch {report['global_batch_size']}, {report['steps']} steps, seed 42."
    )
    lines = [what, expected_speed(report)]
    slowed = busy(report)
    if slowed:
        lines.append(slowed)
    return "\n".join(map(wrapped, lines))


def busy(report: dict) -> str | None:
    """A sentence on other programs that computed before or after the comparison, and what helps."""
    machine = report["machine"]
    # Records of before do not say it.
    return what_is_slowed(report.get("busy_cores", {}), machine["cores"], machine.get("omp", {}))


def expected_speed(report: dict) -> str:
    """The speed that parallelism can bring on this machine, and why it may be nothing."""
    machine, n, batch = report["machine"], report["world_size"], report["global_batch_size"]
    gpus, cores = len(machine["gpus"]), machine["cores"]
    if n == 1:
        return (
            "Expect every level to be about as fast as level 00: each is one process, and differs in what its "
            "abstraction adds to a step. What shows here is that nothing else changes."
        )
    if gpus > 1 and gpus >= n:
        return (
            f"Expect no speed-up from {n} GPUs: at batch {batch} a GPU computes a step of this small network in less "
            "time than its kernels take to launch, and DDP's all-reduce comes on top. Larger networks and batches "
            "gain. What holds at any size: equal weights, exact evaluation, even memory under DDP."
        )
    if gpus:
        return (
            f"Expect {n} processes to be slower than one: they share {'one GPU' if gpus == 1 else f'{gpus} GPUs'}, and "
            "their gradients travel through the CPU. What holds here too: equal weights, exact evaluation, even memory."
        )
    shared = f"{cores} cores" if cores > 1 else "core"
    return (
        f"Expect {n} processes to be about as fast as one, or slower: they share the {shared} that one has "
        "alone, and the all-reduce of their gradients comes on top. Where it was recorded, two processes on two cores "
        "were slower than one at batch 64 and about as fast at 256. What shows here is that nothing but speed and "
        "memory changes."
    )
