"""Draw what each of four ranks holds under every layout: python docs/pictures/draw_layouts.py"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS, BLOCKS = 4, 4
INKS = {"parameters": "#2f6fb3", "gradients": "#b85c1e", "optimizer": "#348a56", "data": "#84489a"}
PANEL, LEFT, TOP = 176, 66, 44
CELL, HIGH, GAP = 34, 26, 4
STYLE = (
    "<style>.t{font:13px sans-serif;fill:#808890}.s{font:11px sans-serif;fill:#808890}"
    ".e{fill:#808890;fill-opacity:.12;stroke:#808890;stroke-opacity:.5}.l{stroke:#808890;stroke-dasharray:3 3}</style>"
)

Box = tuple[float, float, float, float]
"""Left, top, right, bottom of what is held, as parts of a cell."""
Holds = Callable[[int, int], Sequence[Box]]
"""Of (rank, block)."""
ALL: Sequence[Box] = [(0, 0, 1, 1)]


def all_of(_: int, __: int) -> Sequence[Box]:
    return ALL


def rows(places: int) -> Holds:
    """Each parameter's rows, dealt over so many places."""
    return lambda rank, _: [(0, rank % places / places, 1, (rank % places + 1) / places)]


def columns(rank: int, _: int) -> Sequence[Box]:
    """A piece of each weight."""
    return [(rank / RANKS, 0, (rank + 1) / RANKS, 1)]


def stage(rank: int, block: int) -> Sequence[Box]:
    return ALL if block == rank else []


def expert(rank: int, _: int) -> Sequence[Box]:
    """What is not an expert, and one expert of four."""
    return [(0, 0, 1, 0.34), (rank / RANKS, 0.42, (rank + 1) / RANKS, 1)]


def first(rank: int, _: int) -> Sequence[Box]:
    return ALL if rank == 0 else []


def samples(rank: int) -> Sequence[Box]:
    """A quarter of the samples."""
    return [(0, rank / RANKS, 1, (rank + 1) / RANKS)]


def everything(_: int) -> Sequence[Box]:
    return ALL


def chunks(rank: int) -> Sequence[Box]:
    """An early and a late part of every sequence."""
    late = 2 * RANKS - 1 - rank
    return [(at / (2 * RANKS), 0, (at + 1) / (2 * RANKS), 1) for at in (rank, late)]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Of one layout; `experts` draws where the cells' experts are."""

    parameters: Holds
    gradients: Holds
    optimizer: Holds
    data: Callable[[int], Sequence[Box]]
    said: str
    ranks: Sequence[str] = ("rank 0", "rank 1", "rank 2", "rank 3")


def same(holds: Holds, data: Callable[[int], Sequence[Box]], said: str) -> Picture:
    """Parameters, gradients and optimizer state alike."""
    return Picture(parameters=holds, gradients=holds, optimizer=holds, data=data, said=said)


PICTURES = {
    "threads": Picture(
        parameters=first, gradients=all_of, optimizer=first, data=samples,
        said="one process: weights and optimizer once, gradients in each thread",
        ranks=("thread 0", "thread 1", "thread 2", "thread 3"),
    ),
    "ddp": same(all_of, samples, "everything whole on every rank; gradients are added"),
    "zero1": Picture(
        parameters=all_of, gradients=all_of, optimizer=rows(4), data=samples,
        said="each rank updates its rows of every parameter, then new rows are gathered",
    ),
    "zero2": Picture(
        parameters=all_of, gradients=rows(4), optimizer=rows(4), data=samples,
        said="gradients are scattered as they are added: each rank keeps its rows",
    ),
    "fsdp": same(rows(4), samples, "a block's rows are gathered before it runs and freed after it"),
    "hsdp": same(rows(2), samples, "dp_replicate=2,dp_shard=2: 0 and 1 share the rows, 2 and 3 hold the same again"),
    "tp": same(columns, everything, "a piece of each large weight; all ranks work on the same samples"),
    "pp": same(stage, everything, "each rank has a stage; microbatches go from one to the next and back"),
    "cp": same(all_of, chunks, "every rank has a part of every sequence; keys and values go around"),
    "ep": same(expert, samples, "some of the experts, all of the rest; tokens go to their experts and back"),
}  # fmt: skip


def cell(boxes: Sequence[Box], *, x: float, y: float, wide: float, high: float, ink: str) -> str:
    """What is held of one cell, over the outline of the whole."""
    found = [f'<rect class="e" x="{x}" y="{y}" width="{wide}" height="{high}" rx="2"/>']
    for left, top, right, bottom in boxes:
        found.append(
            f'<rect x="{x + left * wide:.1f}" y="{y + top * high:.1f}" width="{(right - left) * wide:.1f}" '
            f'height="{(bottom - top) * high:.1f}" rx="1.5" fill="{ink}"/>'
        )
    return "".join(found)


def panel(picture: Picture, rank: int) -> str:
    """One rank: parameters, gradients and optimizer state of four blocks, and its part of the batch."""
    x = LEFT + rank * PANEL
    found = [f'<text class="t" x="{x}" y="20">{picture.ranks[rank]}</text>']
    kinds = {"parameters": picture.parameters, "gradients": picture.gradients, "optimizer": picture.optimizer}
    for column, (kind, holds) in enumerate(kinds.items()):
        for block in range(BLOCKS):
            place = {"x": x + column * (CELL + GAP), "y": TOP + block * (HIGH + GAP)}
            found.append(cell(holds(rank, block), **place, wide=CELL, high=HIGH, ink=INKS[kind]))
    top = TOP + BLOCKS * (HIGH + GAP) + 12
    wide = 3 * CELL + 2 * GAP
    found.append(cell(picture.data(rank), x=x, y=top, wide=wide, high=2 * HIGH, ink=INKS["data"]))
    return "".join(found)


def picture(name: str, drawn: Picture) -> str:
    """The whole SVG."""
    body = [panel(drawn, rank) for rank in range(RANKS)]
    for block in range(BLOCKS):
        y = TOP + block * (HIGH + GAP) + 17
        body.append(f'<text class="s" x="{LEFT - 8}" y="{y}" text-anchor="end">block {block}</text>')
    data = TOP + BLOCKS * (HIGH + GAP) + 12
    body.append(f'<text class="s" x="{LEFT - 8}" y="{data + 24}" text-anchor="end">samples</text>')
    body.append(f'<text class="s" x="{LEFT - 8}" y="{data + 38}" text-anchor="end">× tokens</text>')
    low = data + 2 * HIGH + 24
    words = {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "data": "its part of a batch",
    }
    for at, (kind, word) in enumerate(words.items()):
        x = LEFT + at * 110
        body.append(f'<rect x="{x}" y="{low - 9}" width="10" height="10" rx="2" fill="{INKS[kind]}"/>')
        body.append(f'<text class="s" x="{x + 15}" y="{low}">{word}</text>')
    body.append(f'<text class="t" x="{LEFT}" y="{low + 24}">{drawn.said}</text>')
    wide, high = LEFT + RANKS * PANEL - 20, low + 36
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" role="img"'
    return f'{start} aria-label="{name}: {drawn.said}">{STYLE}{"".join(body)}</svg>\n'


for name, drawn in PICTURES.items():
    Path(__file__).with_name(f"holds-{name}.svg").write_text(picture(name, drawn), encoding="utf-8")
