"""The planner's search against looking at every layout: seconds of one core, layouts looked at, and whether they agree.

    python benchmarks/search.py                 # Llama-3 405B on 16,384 H100s, 16.8 million tokens a step, and others
    python benchmarks/search.py --quick         # without looking at every layout of the largest
    python benchmarks/search.py --cases small 8B

Seconds are of the process, so that other work on the machine does not count. `equal` is of the best layout of every
family: its name, its microbatch, its seconds and its bytes, all to the bit.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.search.branch_and_bound import SearchResult, search, search_exhaustively, sort_key
from paceline.planner.search.search_space import SearchSpace

LLAMA_8B = Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=128256)
LLAMA_70B = Decoder(layers=80, width=8192, mlp_width=28672, heads=64, kv_heads=8, vocabulary=128256)
LLAMA_405B = Decoder(layers=126, width=16384, mlp_width=53248, heads=128, kv_heads=8, vocabulary=128256)
SMALL = Decoder(layers=6, width=384, mlp_width=1536, heads=6, vocabulary=65, is_gated=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a cluster."""

    name: str
    model: Decoder
    cluster: str
    length: int
    batch: int
    precision: str = "bf16"
    grid: SearchSpace = SearchSpace()  # noqa: RUF009


CASES = (
    Case(name="small on 2 CPU ranks", model=SMALL, cluster="2xcpu", length=256, batch=64, precision="fp32"),
    Case(name="8B on 8 H100", model=LLAMA_8B, cluster="8xH100-80G", length=8192, batch=128),
    Case(name="70B on 128 H100", model=LLAMA_70B, cluster="16x8xH100-80G", length=8192, batch=512),
    Case(
        name="70B on 128 H100, gathered in bfloat16 too",
        model=LLAMA_70B, cluster="16x8xH100-80G", length=8192, batch=512, grid=SearchSpace(params=("fp32", "bf16")),
    ),
    Case(name="405B on 16,384 H100", model=LLAMA_405B, cluster="2048x8xH100-80G", length=8192, batch=2048),
)  # fmt: skip


def forecast_of(case: Case) -> CostModel:
    """Anew, so that nothing is remembered."""
    facts = build_decoder_profile(
        case.model, name=case.name, length=case.length, global_batch_size=case.batch, precision=case.precision
    )
    return CostModel(profile=facts, cluster=parse_cluster(case.cluster))


def timed(look: Callable[..., SearchResult], case: Case) -> tuple[SearchResult, float]:
    """With the seconds that this process computed for it."""
    forecast = forecast_of(case)
    start = time.process_time()
    found = look(forecast, grid=case.grid)
    return found, time.process_time() - start


def row(case: Case, *, quick: bool) -> dict[str, Any]:
    """One line of the table."""
    runs = [timed(search, case) for _ in range(3)]
    found = runs[0][0]
    first = found.fastest
    line: dict[str, Any] = {
        "case": case.name,
        "best": "" if first is None else str(first.candidate),
        "step_seconds": None if first is None else first.step_seconds,
        "search_seconds": min(seconds for _, seconds in runs),
        "search_seconds_worst": max(seconds for _, seconds in runs),
        "families": len(found.best),
        "looked_at": found.num_estimates,
        "nodes": found.num_nodes,
    }
    if not quick:
        every, seconds = timed(search_exhaustively, case)
        same = {name: sort_key(one) for name, one in found.best.items()} == {
            n: sort_key(o) for n, o in every.best.items()
        }
        line |= {"all": every.num_estimates, "all_seconds": seconds, "equal": same}
    return line


def main() -> None:
    """Print the table; `--out` keeps it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="do not look at every layout of the largest")
    parser.add_argument("--cases", nargs="*", default=[""], help="only those whose name begins so")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for case in (case for case in CASES if case.name.startswith(tuple(asked.cases))):
        line = row(case, quick=asked.quick and case is CASES[-1])
        rows.append(line)
        print(f"{line['case']}: {line['best']}, {line['step_seconds']:.3f} s a step")
        print(
            f"  search {line['search_seconds']:.3f} s (worst of 3 {line['search_seconds_worst']:.3f}), "
            f"{line['families']} families, {line['looked_at']:,} layouts looked at closely of {line['nodes']:,} nodes"
        )
        if "all" in line:
            verdict = "equal" if line["equal"] else "DIFFERENT"
            print(f"  all {line['all']:,} layouts {line['all_seconds']:.1f} s: {verdict}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
