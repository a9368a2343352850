"""The picture of `benchmarks.suites.throughput`: what the levels on several devices reach of level 00 on one."""

from pathlib import Path

from benchmarks.report.plots import BLUE, CLEAR, INK, SKY, SMALL, SOFT, STYLE, VERMILION, save, subplots
from benchmarks.suites.throughput import ALL_CORES, FIRST, of_devices

NAME = "scaling.png"
COLUMNS = 2


def draw(groups: list[dict], machine: dict, folder: Path) -> list[str]:
    """Write scaling.png into `folder`, in place of an older one, and return its name.

    Nothing is drawn, and the list is empty, where no group has a row that can be held against level 00 on one device.
    So it is with records of before, where level 00 had all cores.
    """
    import matplotlib

    path = folder / NAME
    path.unlink(missing_ok=True)
    drawable = [group for group in groups if speed_ups(group)]
    if not drawable:
        return []
    lines = -(-len(drawable) // COLUMNS)
    most_rows = max(len(speed_ups(group)) for group in drawable)
    with matplotlib.rc_context(STYLE):
        figure, panels = subplots(lines, COLUMNS, 0.9 + lines * (0.4 * most_rows + 0.9))
        right = 1.3 * max(map(_longest, drawable))
        for panel, group in zip(panels, drawable, strict=False):
            _panel(panel, group, right)
        for panel in panels[len(drawable) :]:
            panel.set_visible(False)
        told = (
            f"Measured: medians of {drawable[0]['rounds']} paired ratios, intervals. “02 on 2”: level 02 on 2 "
            f"devices. Dashed: {max(map(_most_devices, drawable))} times one device. "
        )
        about = " ".join(of_devices(drawable[0]["rows"])).removesuffix(".")
        save(figure, path, f"{told}{about}", machine)
    return [NAME]


def speed_ups(group: dict) -> dict[str, dict]:
    """The pairs of a group that hold several devices, or all cores, against level 00 on one device, by their rows."""
    rows = group["rows"]
    if FIRST not in rows or "apart" not in rows[FIRST]:
        return {}
    pairs = {pair["of"]: pair for pair in group["pairs"] if pair["to"] == FIRST}
    return {name: pair for name, pair in pairs.items() if rows[name]["workers"] > 1 or rows[name]["apart"] == ALL_CORES}


def _most_devices(group: dict) -> int:
    return max(row["workers"] for row in group["rows"].values())


def _longest(group: dict) -> float:
    """The furthest that anything reaches in the panel of this group: an interval, or the dashed line."""
    highest = max(pair["interval"][1] for pair in speed_ups(group).values())
    return max(highest, _most_devices(group))


def _panel(panel, group: dict, right: float) -> None:
    """The speed-ups of one group, a bar for each row, whose length is a ratio: 1 is one device."""
    pairs = speed_ups(group)
    labels = []
    for y, (name, pair) in enumerate(pairs.items()):
        row = group["rows"][name]
        low, high = pair["interval"]
        colour = SKY if row["apart"] else BLUE
        panel.barh(y, pair["median"], 0.62, color=colour, alpha=0.85)
        whiskers = [[pair["median"] - low], [high - pair["median"]]]
        panel.errorbar(pair["median"], y, xerr=whiskers, color=INK, capsize=4, linewidth=1.4)
        panel.text(high + 0.03 * right, y, f"{pair['median']:.2f}", va="center", bbox=CLEAR)
        number = row["level"][:2]
        labels.append(f"{number}, all" if row["apart"] else f"{number} on {row['workers']}")
    panel.axvline(1, color=SOFT, linewidth=1.2)
    panel.axvline(_most_devices(group), color=VERMILION, linestyle="--", linewidth=1.4)
    panel.set_yticks(range(len(labels)), labels)
    panel.invert_yaxis()
    panel.set_xlim(0, right)
    panel.grid(axis="x")
    panel.tick_params(axis="y", length=0)
    panel.set_xlabel("times level 00 on one device")
    panel.set_ylabel("level")
    kind, _, batch = group["group"].partition(": ")
    of_whom, _, _ = batch.partition(",")
    panel.set_title(f"{kind}:\n{of_whom}", fontsize=SMALL)
