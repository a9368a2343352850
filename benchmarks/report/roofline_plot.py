"""The plot of `benchmarks.suites.ceiling`: the levels under the roofline of the machine, drawn from the record alone.

python -m benchmarks.report.roofline_plot ceiling.json
"""

from pathlib import Path

from benchmarks.report.plots import BLUE, GREEN, INK, ORANGE, SKY, SOFT, STYLE, VERMILION, save, subplots
from benchmarks.report.recorded import read_record
from benchmarks.suites.ceiling import COPY, MACHINE, MATMUL

NAME = "roofline.png"
COLOURS = (BLUE, VERMILION, GREEN, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v")
HEIGHT = 4.6  # inches
# Operations per byte: from a sum of two vectors to a large matrix product.
LEAST_INTENSITY = 0.1
MOST_INTENSITY = 1000
# Of the roof's lower limit: where the axis of rates begins.
ROOM_BELOW = 0.7


def draw(record: dict, machine: dict, folder: Path) -> Path:
    """Write roofline.png into `folder`, in place of an older one; returns its path.

    Args:
        record: of `benchmarks.suites.ceiling.record`, with the machine's own two rows. KeyError is raised if something
            in it is missing.
        machine: of `benchmarks.harness.records.machine`.
    """
    import matplotlib

    path = folder / NAME
    path.unlink(missing_ok=True)
    rows = record["rows"]
    arithmetic = rows[MATMUL]["gflops_per_sec"]
    bandwidth = rows[COPY]["gigabytes_per_sec"]
    with matplotlib.rc_context(STYLE):
        figure, (panel,) = subplots(1, 1, HEIGHT)
        _draw_roof(panel, arithmetic, bandwidth, rows[MATMUL]["precision"])
        levels = {name: row for name, row in rows.items() if name not in MACHINE}
        for (name, row), colour, marker in zip(levels.items(), COLOURS, MARKERS, strict=False):
            share = f"{name}: {row['share_of_roof']:.0%} of its roof"
            panel.plot(_intensity(row), _rate(row), marker, color=colour, markersize=8, label=share)
        panel.set(xscale="log", yscale="log", xlim=(LEAST_INTENSITY, MOST_INTENSITY))
        panel.set_ylim(ROOM_BELOW * LEAST_INTENSITY * bandwidth, 3 * arithmetic)
        several = any(row["devices"] > 1 for row in levels.values())
        rate = "GFLOP per second on each GPU" if several else "GFLOP per second"
        panel.set(xlabel="operations for each byte that a step reads or writes", ylabel=rate)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_title("The levels under the roofline of the machine")
        panel.grid()
        panel.legend(fontsize=10, loc="lower right")
        note = f"Measured in the same {record['rounds']} rounds; medians. Bytes are counted as though no cache kept any"
        save(figure, path, note, machine)
    return path


def _intensity(row: dict) -> float:
    """Operations per byte."""
    return row["gflop_per_step"] / row["gigabytes_per_step"]


def _rate(row: dict) -> float:
    """GFLOP per second on each device, because the roof is that of one."""
    return row["gflops_per_sec"] / row["devices"]


def _draw_roof(panel, arithmetic: float, bandwidth: float, precision: str) -> None:
    """The two limits, which meet where a byte has just enough operations to keep the cores busy."""
    ridge = arithmetic / bandwidth
    intensities = [LEAST_INTENSITY, ridge, MOST_INTENSITY]
    panel.plot(intensities, [LEAST_INTENSITY * bandwidth, arithmetic, arithmetic], color=INK, linewidth=2)
    panel.axvline(ridge, color=SOFT, linestyle=":", linewidth=1)
    panel.text(
        LEAST_INTENSITY * 1.2,
        1.15 * arithmetic,
        f"a large copy: {bandwidth:.3g} GB/s\n← memory is the limit",
        fontsize=10,
        color=SOFT,
        va="bottom",
    )
    panel.text(
        1.2 * ridge,
        1.15 * arithmetic,
        f"a large {precision} matrix product: {arithmetic:.4g} GFLOP/s\narithmetic is the limit →",
        fontsize=10,
        color=SOFT,
        va="bottom",
    )


def main(argv: list[str] | None = None) -> None:
    record = read_record(
        "benchmarks.report.roofline_plot",
        __doc__.splitlines()[0],
        "record of the ceiling",
        "a ceiling.json of pytest benchmarks --record",
        argv,
    )
    group = record.content["groups"][0]
    print("Written:", draw(group, record.content["machine"], record.folder))


if __name__ == "__main__":
    main()
