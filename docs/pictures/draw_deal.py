"""Draw who computes which microbatch: python docs/pictures/draw_deal.py"""

from pathlib import Path

from paceline.data.order.microbatch_assignment import assign_microbatches

INK = ("#2563a8", "#b4541a", "#2c7a4b")


def row(replicas: int, top: int) -> str:
    """One line of six microbatches, coloured by replica."""
    owner = {j: r for r in range(replicas) for j in assign_microbatches(6, replica=r, replicas=replicas)}
    cells = [f'<text x="16" y="{top + 25}" class="t">{replicas} ranks</text>']
    for j in range(6):
        x = 100 + j * 82
        cells.append(f'<rect x="{x}" y="{top}" width="76" height="40" rx="5" fill="{INK[owner[j]]}"/>')
        cells.append(f'<text x="{x + 38}" y="{top + 18}" class="w" text-anchor="middle">microbatch {j}</text>')
        cells.append(f'<text x="{x + 38}" y="{top + 32}" class="w" text-anchor="middle">rank {owner[j]}</text>')
    return "".join(cells)


style = "<style>.t{font:14px sans-serif;fill:#808890}.w{font:11px sans-serif;fill:#fff}</style>"
body = "".join(row(n, 12 + 52 * i) for i, n in enumerate((1, 2, 3)))
svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 604 170" width="604">{style}{body}</svg>\n'
Path(__file__).with_name("deal.svg").write_text(svg)
