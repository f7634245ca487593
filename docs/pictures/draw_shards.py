"""Draw which virtual shard gives which sample, and who reads it: python docs/pictures/draw_shards.py"""

from pathlib import Path

from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.data.order.virtual_shards import samples_per_shard

SHARDS = ("#2563a8", "#b4541a", "#2c7a4b", "#7a3f8f")
LEFT = (9, 5, 13, 12)
SIZE, WIDE = 12, 36


def batches() -> list[list[int]]:
    """What each batch takes from each shard, until nothing is left."""
    left, found = list(LEFT), []
    while any(left):
        takes = samples_per_shard(have=left, ended=[True] * len(left), size=SIZE) or []
        left = [a - b for a, b in zip(left, takes, strict=True)]
        found.append(takes)
    return found


def row(number: int, takes: list[int], top: int) -> str:
    """One global batch, coloured by shard."""
    owner = [shard for shard, count in enumerate(takes) for _ in range(count)]
    cells = [f'<text x="16" y="{top + 20}" class="t">batch {number}</text>']
    for place, shard in enumerate(owner):
        x = 90 + place * WIDE
        cells.append(f'<rect x="{x}" y="{top}" width="{WIDE - 3}" height="32" rx="4" fill="{SHARDS[shard]}"/>')
        cells.append(f'<text x="{x + 16}" y="{top + 20}" class="w" text-anchor="middle">{shard}</text>')
    return "".join(cells)


def ranks(replicas: int, top: int) -> str:
    """Which rank computes, and so reads, which part of a batch of four microbatches."""
    cells = [f'<text x="16" y="{top + 14}" class="t">{replicas} rank{"s" if replicas > 1 else ""}</text>']
    for replica in range(replicas):
        for j in assign_microbatches(4, replica=replica, replicas=replicas):
            x, wide = 90 + j * 3 * WIDE, 3 * WIDE - 3
            cells.append(f'<path d="M{x} {top + 2}v6h{wide}v-6" class="l"/>')
            cells.append(
                f'<text x="{x + wide / 2}" y="{top + 21}" class="s" text-anchor="middle">rank {replica}</text>'
            )
    return "".join(cells)


style = (
    "<style>.t{font:14px sans-serif;fill:#808890}.s{font:11px sans-serif;fill:#808890}"
    ".w{font:12px sans-serif;fill:#fff}.l{fill:none;stroke:#808890}</style>"
)
rows = [row(number, takes, 30 + 40 * number) for number, takes in enumerate(batches())]
below = 36 + 40 * len(rows)
said = '<text x="90" y="18" class="s">each cell is a sample, with the number of the shard that it comes from</text>'
body = said + "".join(rows) + "".join(ranks(n, below + 28 * i) for i, n in enumerate((1, 2, 4)))
size = f'viewBox="0 0 540 {below + 90}" width="540"'
svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{body}</svg>\n'
Path(__file__).with_name("shards.svg").write_text(svg)
