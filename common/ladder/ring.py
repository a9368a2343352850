"""A ring all-reduce of four ranks, chunk by chunk with its numbers: as text, and as a page with buttons.

The numbers are those of four processes that run `common.small.ring`. Rank 0 has ones, rank 1 tens, rank 2 hundreds and
rank 3 thousands, so each sum says whose numbers are in it.
"""

import json
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.process_group import process_group
from common.processes import ranks
from common.small.ring import ring_messages

RANKS = 4
START = [[(part + 1) * 10**rank for part in range(RANKS)] for rank in range(RANKS)]
SUMS = [sum(START[rank][part] for rank in range(RANKS)) for part in range(RANKS)]


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
    shown = []
    for number, state in enumerate(states):
        actions = [action(state, rank) for rank in range(RANKS)]
        fields = {"title": title(number, state), "actions": actions, "numbers": state.numbers}
        shown.append(fields | {"received": state.received, "sent": state.sent})
    data = json.dumps({"states": shown, "sums": SUMS})
    return PAGE.replace("STYLE", STYLE).replace("DATA", data).replace("SCRIPT", SCRIPT)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A ring all-reduce, message by message</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>STYLE</style></head>
<body><main>
<h1>A ring all-reduce, message by message</h1>
<p>Four ranks add up what they have. Each sends to its right neighbour only: rank 0 to rank 1, and so on, and rank 3 to
rank 0. Rank 0 has ones, rank 1 tens, rank 2 hundreds, rank 3 thousands, so a sum says whose numbers are in it.</p>
<p class="buttons"><button id="back">← Back</button><button id="next">Next →</button><span id="place"></span></p>
<h2 id="title" aria-live="polite"></h2>
<table><thead><tr><th></th><th>part 0</th><th>part 1</th><th>part 2</th><th>part 3</th><th></th></tr></thead>
<tbody id="ranks"></tbody></table>
<p class="legend"><span class="came">has just come</span> <span class="sum">summed over all four</span></p>
<p>The arrow keys go on and back. Computed by four processes that run <code>common/small/ring.py</code>.</p>
</main><script>const ring = DATA;
SCRIPT</script></body></html>
"""

STYLE = """
:root { --ink: #1f2328; --soft: #59636e; --paper: #fff; --line: #d1d9e0; --came: #ffd591; --sum: #a8e0cd;
  --edge: #c46a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --line: #3d444d;
  --came: #7a4506; --sum: #0c5a45; --edge: #f0a030; } }
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 760px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; min-height: 3em; }
button { font: inherit; padding: 6px 16px; margin-right: 8px; color: var(--ink); background: var(--paper);
  border: 1px solid var(--line); border-radius: 6px; }
button:disabled { color: var(--soft); }
table { border-collapse: separate; border-spacing: 4px; width: 100%; }
th { font-weight: normal; color: var(--soft); white-space: nowrap; }
td.number { border: 1px solid var(--line); border-radius: 4px; padding: 8px 2px; text-align: center;
  font-variant-numeric: tabular-nums; }
td.action { color: var(--soft); padding-left: 12px; }
.sum { background: var(--sum); } .came { background: var(--came); }
td.came { outline: 3px solid var(--edge); } td.came.sum { background: var(--sum); }
.legend .came { outline: 2px solid var(--edge); }
.legend span { padding: 2px 8px; border-radius: 4px; margin-right: 8px; }
@media (max-width: 600px) { td.action { display: none; } }
"""

SCRIPT = """
let shown = 0;
const byId = id => document.getElementById(id);
function show(number) {
  shown = Math.max(0, Math.min(ring.states.length - 1, number));
  const state = ring.states[shown];
  byId("title").textContent = state.title;
  byId("place").textContent = `${shown} of ${ring.states.length - 1} messages`;
  byId("back").disabled = shown === 0;
  byId("next").disabled = shown === ring.states.length - 1;
  byId("ranks").replaceChildren(...state.numbers.map((numbers, rank) => row(state, numbers, rank)));
}
function row(state, numbers, rank) {
  const line = document.createElement("tr");
  line.append(cell("th", `rank ${rank}`, ""));
  numbers.forEach((number, part) => {
    const classes = ["number"];
    if (state.received[rank] === part) classes.push("came");
    if (number === ring.sums[part]) classes.push("sum");
    line.append(cell("td", number, classes.join(" ")));
  });
  line.append(cell("td", state.actions[rank], "action"));
  return line;
}
function cell(tag, content, classes) {
  const element = document.createElement(tag);
  element.textContent = content;
  element.className = classes;
  return element;
}
byId("back").onclick = () => show(shown - 1);
byId("next").onclick = () => show(shown + 1);
document.onkeydown = event => {
  if (event.key === "ArrowRight") show(shown + 1);
  if (event.key === "ArrowLeft") show(shown - 1);
};
show(0);
"""
