"""Draw what each of four ranks holds under every layout, readable on a phone: python docs/pictures/draw_layouts.py"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS, BLOCKS = 4, 4
INKS = {"parameters": "#2f7dd1", "gradients": "#d0701f", "optimizer": "#2f9e63", "batch": "#9a55b8"}
WORDS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer", "batch": "batch"}
WIDE, PANEL, TOP = 360, 90, 26
CELL, HIGH, GAP = 22, 17, 3
STYLE = (
    "<style>text{font:600 13px system-ui,sans-serif;fill:#717984}"
    ".e{fill:#808890;fill-opacity:.13;stroke:#808890;stroke-opacity:.6}</style>"
)

Box = tuple[float, float, float, float]
"""Left, top, right, bottom of what is held, as parts of a cell."""
Cells = Callable[[int, int], Sequence[Box]]
"""The boxes of (rank, block)."""
WHOLE: Sequence[Box] = [(0, 0, 1, 1)]


def whole(_: int, __: int) -> Sequence[Box]:
    return WHOLE


def rows(rank: int, _: int) -> Sequence[Box]:
    """A quarter of the rows of each parameter."""
    return [(0, rank / RANKS, 1, (rank + 1) / RANKS)]


def rows_of_group(rank: int, _: int) -> Sequence[Box]:
    """A half of the rows of each parameter: two groups of two ranks hold the same."""
    return [(0, rank % 2 / 2, 1, (rank % 2 + 1) / 2)]


def columns(rank: int, _: int) -> Sequence[Box]:
    """A quarter of the columns of each weight."""
    return [(rank / RANKS, 0, (rank + 1) / RANKS, 1)]


def stage(rank: int, block: int) -> Sequence[Box]:
    """One block of four."""
    return WHOLE if block == rank else []


def experts(rank: int, _: int) -> Sequence[Box]:
    """What is no expert, and one expert of four."""
    return [(0, 0, 1, 0.34), (rank / RANKS, 0.46, (rank + 1) / RANKS, 1)]


def first(rank: int, _: int) -> Sequence[Box]:
    """Everything in the first thread, which stands for the process."""
    return WHOLE if rank == 0 else []


def all_samples(_: int) -> Sequence[Box]:
    return WHOLE


def own_samples(rank: int) -> Sequence[Box]:
    """A quarter of the samples, which are the rows of a batch."""
    return rows(rank, 0)


def own_tokens(rank: int) -> Sequence[Box]:
    """An early and a late eighth of the tokens, which are the columns of a batch."""
    late = 2 * RANKS - 1 - rank
    return [(at / (2 * RANKS), 0, (at + 1) / (2 * RANKS), 1) for at in (rank, late)]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What the ranks of one layout hold; `says` is read out by a screen reader."""

    says: str
    parameters: Cells = whole
    gradients: Cells = whole
    optimizer: Cells = whole
    batch: Callable[[int], Sequence[Box]] = own_samples
    ranks: int = RANKS
    name: str = "rank"


def same(cells: Cells, *, says: str, batch: Callable[[int], Sequence[Box]] = own_samples) -> Picture:
    """Return a picture whose parameters, gradients and optimizer state are split alike."""
    return Picture(says=says, parameters=cells, gradients=cells, optimizer=cells, batch=batch)


PICTURES = {
    "one": Picture(says="One process holds everything and sees the whole batch.", batch=all_samples, ranks=1),
    "threads": Picture(
        says="threads: one process holds parameters and optimizer state once, and gradients in each thread.",
        parameters=first,
        optimizer=first,
        name="thread",
    ),
    "ddp": Picture(says="ddp: every rank holds everything and sees its own samples."),
    "zero1": Picture(says="zero1: every rank holds a quarter of the optimizer state.", optimizer=rows),
    "zero2": Picture(
        says="zero2: every rank holds a quarter of the optimizer state and of the gradients.",
        gradients=rows,
        optimizer=rows,
    ),
    "fsdp": same(rows, says="fsdp: every rank holds a quarter of parameters, gradients and optimizer state."),
    "hsdp": same(rows_of_group, says="hsdp: ranks 0 and 1 share the rows; ranks 2 and 3 hold the same again."),
    "tp": same(
        columns, says="tp: every rank holds a quarter of each large weight and sees the whole batch.", batch=all_samples
    ),
    "pp": same(
        stage, says="pp: every rank holds one stage; the whole batch passes through all of them.", batch=all_samples
    ),
    "cp": Picture(says="cp: every rank holds everything and sees a part of every sequence.", batch=own_tokens),
    "ep": same(experts, says="ep: every rank holds a quarter of the experts and all of the rest."),
}


def cell(boxes: Sequence[Box], *, x: float, y: float, wide: float, high: float, ink: str) -> str:
    """Draw the held parts of one cell over the outline of the whole."""
    found = [f'<rect class="e" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="2"/>']
    for left, top, right, bottom in boxes:
        place = f'x="{x + left * wide:.1f}" y="{y + top * high:.1f}"'
        size = f'width="{(right - left) * wide:.1f}" height="{(bottom - top) * high:.1f}"'
        found.append(f'<rect {place} {size} rx="1.5" fill="{ink}"/>')
    return "".join(found)


def panel(drawn: Picture, rank: int) -> str:
    """Draw one rank: its parameters, gradients and optimizer state of four blocks, and its part of the batch."""
    x = (WIDE - drawn.ranks * PANEL) / 2 + rank * PANEL + 9
    wide = 3 * CELL + 2 * GAP
    name = f"{drawn.name} {rank}" if drawn.ranks > 1 else "process"
    found = [f'<text x="{x + wide / 2:g}" y="16" text-anchor="middle">{name}</text>']
    kinds = {"parameters": drawn.parameters, "gradients": drawn.gradients, "optimizer": drawn.optimizer}
    for column, (kind, cells) in enumerate(kinds.items()):
        for block in range(BLOCKS):
            left, top = x + column * (CELL + GAP), TOP + block * (HIGH + GAP)
            found.append(cell(cells(rank, block), x=left, y=top, wide=CELL, high=HIGH, ink=INKS[kind]))
    top = TOP + BLOCKS * (HIGH + GAP) + 7
    found.append(cell(drawn.batch(rank), x=x, y=top, wide=wide, high=2 * HIGH, ink=INKS["batch"]))
    return "".join(found)


def legend(y: float) -> str:
    """Draw the colours and their names in one row."""
    found, x = [], 9.0
    for kind, word in WORDS.items():
        found.append(f'<rect x="{x:g}" y="{y - 10:g}" width="11" height="11" rx="2" fill="{INKS[kind]}"/>')
        found.append(f'<text x="{x + 15:g}" y="{y:g}">{word}</text>')
        x += 29 + 7.1 * len(word)
    return "".join(found)


def picture(drawn: Picture) -> str:
    """Return the whole SVG."""
    low = TOP + BLOCKS * (HIGH + GAP) + 7 + 2 * HIGH + 25
    body = "".join(panel(drawn, rank) for rank in range(drawn.ranks)) + legend(low)
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {low + 9}" width="{WIDE * 1.25:g}" role="img"'
    return f'{start} aria-label="{drawn.says}">{STYLE}{body}</svg>\n'


if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        Path(__file__).with_name(f"holds-{name}.svg").write_text(picture(drawn), encoding="utf-8")
