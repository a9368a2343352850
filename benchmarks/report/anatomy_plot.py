"""The plot of `benchmarks.suites.anatomy`, drawn from its record alone: a bar for each level, of its step's parts."""

from pathlib import Path

from benchmarks.harness import parts
from benchmarks.report.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILION,
    YELLOW,
    legend,
    save,
    subplots,
)

COLOURS = {
    parts.LOADING: INK,
    parts.COPIES: VERMILION,
    parts.FORWARD: SKY,
    parts.BACKWARD: BLUE,
    parts.AVERAGING: ORANGE,
    parts.WAITING: YELLOW,
    parts.GRADIENT_NORM: PURPLE,
    parts.OPTIMIZER: GREEN,
    parts.PYTHON: GREY,
}
HEIGHT_OF_A_ROW = 0.52  # inches
FREE = 0.55  # of the width, right of the longest bar, for what is written beside the bars


def picture(record: dict, path: Path) -> None:
    """A bar for each row of the record, and a diamond for its whole step."""
    (group,) = record["groups"]
    rows = group["rows"]
    figure, (panel,) = subplots(1, 1, 2.4 + HEIGHT_OF_A_ROW * len(rows))
    longest = max(row["high"] for row in rows.values())
    labels = []
    for y, (name, row) in enumerate(rows.items()):
        # The level above what it runs on, and the short name by which other bars refer to it.
        level, _, runs_on = name.partition(", ")
        labels.append(f"{level}\n{runs_on} [{row['short']}]")
        end = 0.0
        for part, colour in COLOURS.items():
            milliseconds = row["parts"][part]["median"]
            panel.barh(y, milliseconds, 0.7, end, color=colour)
            end += milliseconds
        whiskers = [[row["median"] - row["low"]], [row["high"] - row["median"]]]
        panel.errorbar(row["median"], y, xerr=whiskers, fmt="D", color=INK, markersize=4, capsize=4, linewidth=1.4)
        panel.text(max(row["high"], end) + 0.025 * longest, y, _beside(group, name), va="center")
    panel.set_yticks(range(len(rows)), labels)
    panel.tick_params(axis="y", length=0, labelsize=SMALL)
    panel.invert_yaxis()
    panel.set_xlim(0, (1 + FREE) * longest)
    panel.set_xlabel("milliseconds of a step")
    panel.grid(axis="x")
    panel.set_title("The parts of a step, level by level")
    shown = {}
    for part, colour in COLOURS.items():
        if any(row["parts"][part]["median"] for row in rows.values()):
            shown[part] = colour
    legend(figure, shown, 2, 1.4, fontsize=SMALL)
    cores = next(iter(rows.values()))["cores_per_device"]
    devices = max(row["devices"] for row in rows.values())
    device = f"A device is {cores} of the cores" if cores > 1 else "A device is one core"
    told = (
        f"Measured: medians of {group['rounds']} rounds in turn. {device}; {devices} devices share the batch. "
        "Diamond: the whole step, timed apart, with quartiles. × its time, as a multiple of another bar's"
    )
    save(figure, path, told, record["machine"], top=0.25 * ((len(shown) + 1) // 2) + 0.08)


def _beside(group: dict, name: str) -> str:
    """The whole in milliseconds, and as a multiple of the first that it is compared with: '× 1.02 of 02 ×2'."""
    rows = group["rows"]
    text = f"{rows[name]['median']:.1f} ms"
    for pair in group["pairs"]:
        if pair["of"] == name:
            return f"{text}  × {pair['median']:.2f} of {rows[pair['to']]['short']}"
    return text
