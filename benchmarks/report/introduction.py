"""The introduction to a comparison: its levels, and what to expect of them on this machine."""

from benchmarks.harness.load import what_is_slowed
from benchmarks.report.wrapping import wrapped
from common.instruments.result import quantity


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
    waits_passively = report.get("waits_passively", False)
    return what_is_slowed(report.get("busy_cores", {}), machine["cores"], machine.get("omp", {}), waits_passively)


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
    if "cores_per_device" not in report:
        return (
            "This record is of before devices were made of cores: level 00 had all cores, and the others' workers "
            "shared them. So it does not say what a second device brings."
        )
    each = report["cores_per_device"]
    if each is None:
        shared = f"{cores} cores" if cores > 1 else "core"
        return (
            f"{n} devices cannot have a core each: their workers share the {shared} that level 00 has alone. Expect "
            "them to be slower. What shows here is that nothing but speed and memory changes."
        )
    return (
        f"Without GPUs a device is a part of the cores: {quantity(each, 'core')}, with as many threads, pinned. Level "
        f"00 has one device and the others {n}. Expect levels 02 to 04 to be faster than level 00, by less than {n} "
        "times: a share of the batch takes more than its share of the time, and the average of the gradients comes on "
        "top. Larger batches come nearer. One process with all cores has a row apart: a CPU offers this choice, and "
        "GPUs do not."
    )
