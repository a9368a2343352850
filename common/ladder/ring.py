"""A ring all-reduce of four ranks, chunk by chunk with its numbers: as text, and as a page with buttons.

The numbers are those of four processes that run `common.small.ring`. Rank 0 has ones, rank 1 tens, rank 2 hundreds and
rank 3 thousands, so each sum says whose numbers are in it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from common.process_group import process_group
from common.processes import ranks
from common.small.ring import ring_messages

RANKS = 4
START = [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [1000, 2000, 3000, 4000]]  # by rank and part
SUMS = [1111, 2222, 3333, 4444]


class State(NamedTuple):
    """The numbers of all ranks after a message, and what the message was.

    Attributes:
        half: "start", "reduce-scatter" or "all-gather".
        numbers: by rank and part.
        sent, received: the part that each rank has sent to the right and received from the left; empty at the start.
    """

    half: str
    numbers: list[list[int]]
    sent: list[int]
    received: list[int]


def trace() -> list[State]:
    """The states of a ring all-reduce of START, from four processes that carry it out."""
    by_rank = ranks(RANKS).run(_numbers_of_this_rank)
    states = [State("start", START, [], [])]
    for of_a_message in zip(*by_rank, strict=True):
        half = of_a_message[0][0].half
        sent = [message.sent for message, _ in of_a_message]
        received = [message.received for message, _ in of_a_message]
        states.append(State(half, [numbers for _, numbers in of_a_message], sent, received))
    return states


def _numbers_of_this_rank() -> list:
    """This rank's messages, each with its numbers afterwards."""
    with process_group():
        numbers = torch.tensor(START[dist.get_rank()])
        return [(message, numbers.tolist()) for message in ring_messages(numbers)]


def text(states: list[State]) -> str:
    """All states, one below the other."""
    blocks = []
    for number, state in enumerate(states):
        lines = [title(number, state)]
        for rank, numbers in enumerate(state.numbers):
            line = f"  rank {rank}  " + "".join(f"{value:>6}" for value in numbers)
            lines.append(f"{line}   {action(state, rank)}".rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def title(number: int, state: State) -> str:
    if state.half == "start":
        return "Before: each rank has four parts"
    if state.half == "reduce-scatter":
        return f"Message {number}, reduce-scatter: receive a part and add it to your own"
    return f"Message {number}, all-gather: receive a sum and keep it"


def action(state: State, rank: int) -> str:
    if state.half == "start":
        return ""
    return f"rank {rank} sends part {state.sent[rank]} to rank {(rank + 1) % RANKS}"


def page(states: list[State]) -> str:
    """The states as a page of its own that loads nothing: buttons, arrow keys, one message at a time."""
    sections = [_section(number, state) for number, state in enumerate(states)]
    return PAGE.replace("STYLE", STYLE).replace("SECTIONS", "\n".join(sections)).replace("SCRIPT", SCRIPT)


def _section(number: int, state: State) -> str:
    rows = []
    for rank, numbers in enumerate(state.numbers):
        row = f"<tr><th>rank {rank}</th>"
        for part, value in enumerate(numbers):
            has_come = state.received and state.received[rank] == part
            classes = f"{'came' if has_come else ''} {'sum' if value == SUMS[part] else ''}"
            row += f'<td class="{classes.strip()}">{value}</td>'
        rows.append(f'{row}<td class="action">{action(state, rank)}</td></tr>')
    parts = "".join(f"<th>part {part}</th>" for part in range(RANKS))
    table = f"<table><tr><th></th>{parts}<th></th></tr>{''.join(rows)}</table>"
    return f"<section><h2>{title(number, state)}</h2>{table}</section>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A ring all-reduce, message by message</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>STYLE</style></head>
<body><main>
<h1>A ring all-reduce, message by message</h1>
<p>Four ranks add up what they have. Each sends to its right neighbour only: rank 0 to rank 1, and so on, and rank 3 to
rank 0. Rank 0 has ones, rank 1 tens, rank 2 hundreds, rank 3 thousands, so a sum says whose numbers are in it.</p>
<p><button id="back">← Back</button><button id="next">Next →</button></p>
SECTIONS
<p><span class="came">has just come</span> <span class="sum">summed over all four</span></p>
<p>The arrow keys go on and back. Computed by four processes that run <code>common/small/ring.py</code>.</p>
</main><script>SCRIPT</script></body></html>
"""

STYLE = """
:root { --ink: #1f2328; --soft: #59636e; --paper: #fff; --line: #d1d9e0; --sum: #a8e0cd; --edge: #c46a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --line: #3d444d;
  --sum: #0c5a45; --edge: #f0a030; } }
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 760px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; min-height: 3em; }
button { font: inherit; padding: 6px 16px; margin-right: 8px; color: var(--ink); background: var(--paper);
  border: 1px solid var(--line); border-radius: 6px; }
button:disabled { color: var(--soft); }
table { border-spacing: 4px; width: 100%; }
th { font-weight: normal; color: var(--soft); white-space: nowrap; }
td { border: 1px solid var(--line); border-radius: 4px; padding: 8px 2px; text-align: center; }
td.action { border: 0; color: var(--soft); text-align: left; padding-left: 12px; }
span { padding: 2px 8px; border-radius: 4px; margin-right: 8px; }
.sum { background: var(--sum); } .came { outline: 3px solid var(--edge); }
@media (max-width: 600px) { td.action { display: none; } }
"""

SCRIPT = """
const states = document.querySelectorAll("section");
const back = document.getElementById("back");
const next = document.getElementById("next");
let shown = 0;
function show(number) {
  shown = Math.max(0, Math.min(states.length - 1, number));
  states.forEach((state, index) => { state.hidden = index !== shown; });
  back.disabled = shown === 0;
  next.disabled = shown === states.length - 1;
}
back.onclick = () => show(shown - 1);
next.onclick = () => show(shown + 1);
document.onkeydown = event => {
  if (event.key === "ArrowRight") show(shown + 1);
  if (event.key === "ArrowLeft") show(shown - 1);
};
show(0);
"""
