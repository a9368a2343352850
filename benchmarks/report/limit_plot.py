"""The plot of `benchmarks.suites.limit`, drawn from its record alone: images per second, stair by stair."""

from pathlib import Path

from benchmarks.report.plots import BLUE, CLEAR, GREY, INK, SMALL, STYLE, VERMILION, save, subplots, swatch
from benchmarks.suites.limit import cpu_bf16_instructions

NAME = "limit.png"
HEIGHT_OF_A_ROW = 0.44  # inches
FREE = 0.62  # of the width, right of the longest bar, for what is written beside the bars


def draw(groups: list[dict], machine: dict, folder: Path) -> list[str]:
    """Write limit.png into `folder`, in place of an older one; returns its name.

    Args:
        groups: one, of `benchmarks.suites.limit.record`. KeyError is raised if something in it is missing.
        machine: of `benchmarks.harness.records.machine`.
    """
    import matplotlib

    (folder / NAME).unlink(missing_ok=True)
    with matplotlib.rc_context(STYLE):
        _picture(groups[0], machine, folder / NAME)
    return [NAME]


def _picture(group: dict, machine: dict, path: Path) -> None:
    rows = group["rows"]
    names = list(rows)
    figure, (panel,) = subplots(1, 1, 1.95 + HEIGHT_OF_A_ROW * len(rows))
    most = max(row["high"] for row in rows.values())
    for y, (name, row) in enumerate(rows.items()):
        pair = _pair_with_the_one_above(group, name)
        panel.barh(y, row["median"], 0.66, color=_colour(pair), alpha=0.9)
        whiskers = [[row["median"] - row["low"]], [row["high"] - row["median"]]]
        panel.errorbar(row["median"], y, xerr=whiskers, color=INK, capsize=4, linewidth=1.4)
        panel.text(row["high"] + 0.02 * most, y, _beside(row, pair), va="center", bbox=CLEAR)
    panel.set_yticks(range(len(names)), names)
    panel.tick_params(axis="y", length=0)
    panel.invert_yaxis()
    panel.set_xlim(0, (1 + FREE) * most)
    panel.set_xlabel("images per second")
    panel.grid(axis="x")
    panel.set_title("One process, one change after the other")
    entries = {"faster than the bar above": BLUE, "slower": VERMILION, "no clear difference": GREY}
    handles = [swatch(colour) for colour in entries.values()]
    figure.legend(handles, list(entries), loc="upper center", ncols=len(entries), handlelength=1.1, fontsize=SMALL)
    told = [f"Measured: medians of {group['rounds']} rounds in turn, and quartiles"]
    told.append("× ratio to the bar above, with its interval; each bar keeps the changes of those above")
    # Records of before have the instruction sets only.
    bf16 = group.get("bf16") or cpu_bf16_instructions(machine["cpu_flags"])
    told.append(bf16.removesuffix("."))
    told += group["skipped"]
    save(figure, path, ". ".join(told), machine, top=0.36)


def _pair_with_the_one_above(group: dict, name: str) -> dict | None:
    """The pair of a stair with the one that it builds on; None for the first."""
    for pair in group["pairs"]:
        if pair["of"] == name:
            return pair
    return None


def _colour(pair: dict | None) -> str:
    if pair is None:
        return GREY
    low, high = pair["interval"]
    if low > 1:
        return BLUE
    return VERMILION if high < 1 else GREY


def _beside(row: dict, pair: dict | None) -> str:
    text = f"{row['median']:.0f}"
    if pair:
        low, high = pair["interval"]
        text += f"   × {pair['median']:.2f} ({low:.2f}–{high:.2f})"
    return text + ("  noisy" if row["noisy"] else "")
