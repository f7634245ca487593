"""`python -m tests.verification.verify_random_jobs 500`: drawn jobs through all of `verify`, in ranks that are kept from job to job.

`--first` is the first seed. Every line is a draw with its verdict; the last one counts them.

`--update ps` is not drawn: its workers are no ranks of the kept world, they meet the servers at a store and end with
them. Whole commands verify it, in `test_parameter_server.py`; `hogwild` has no verdict.
"""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.launch.launch_environment import choose_exact_kernels

choose_exact_kernels()  # before torch, for exact mode

from paceline.comm.process_group import World  # noqa: E402
from paceline.config.task import Task  # noqa: E402
from paceline.errors import ExitCode, PacelineError  # noqa: E402
from paceline.trainer.setup.prepare import prepare  # noqa: E402
from paceline.verification.verify_worker import run_all_rungs  # noqa: E402
from tests.matrix.rank_pool import Pool  # noqa: E402
from tests.verification.random_jobs import Draw, draw, job_of  # noqa: E402

STEPS = 2
SECONDS = 150.0


def examined(value: dict[str, Any], world: World) -> dict[str, Any]:
    """All of `verify` on a draw, as this rank has it."""
    one = Draw(**value)
    try:
        task = Task(
            verb="verify",
            job="tests/verification/random_jobs.py",
            layout=one.layout,
            update=one.update,
            compress=one.compress,
            ranks=one.ranks,
            settings=one.settings,
        )
        answer = run_all_rungs(prepare(task, job=job_of(one)), world, steps=STEPS)
        found: dict[str, Any] = {"state": "done", **answer}
    except PacelineError as error:
        refused = error.exit_code == ExitCode.REFUSED
        found = {"state": "refused" if refused else "failed", "why": str(error), "text": traceback.format_exc()}
    except BaseException as error:
        found = {"state": "failed", "why": f"{type(error).__name__}: {error}", "text": traceback.format_exc()}
    gc.collect()
    return {**found, "at": time.monotonic(), "rank": world.rank}


def play(draws: list[Draw], *, log: Path) -> Iterator[tuple[Draw, dict[str, Any]]]:
    """Answers in the draws' order; a pool in which one has failed is not used again."""
    pool: Pool | None = None
    for one in draws:
        if pool is None or pool.ranks != one.processes:
            if pool is not None:
                pool.close()
            pool = Pool(ranks=one.processes, log=log, do=examined)
        answer = pool.ask(one.as_json(), seconds=SECONDS)
        if answer["state"] in ("failed", "hung"):
            pool.close()
            pool = None
        yield one, answer
    if pool is not None:
        pool.close()


def in_order(seeds: range) -> list[Draw]:
    """Those of as many ranks one after another, so that they share a world."""
    return sorted((draw(seed) for seed in seeds), key=lambda one: one.processes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verification.verify_random_jobs")
    parser.add_argument("number", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--log", default="/tmp/sound-log")
    asked = parser.parse_args()
    counts: dict[str, int] = {}
    draws = in_order(range(asked.first, asked.first + asked.number))
    if asked.seeds:
        draws = sorted(map(draw, asked.seeds), key=lambda one: one.processes)
    draws = [one for one in draws if one.processes in asked.ranks]
    for one, answer in play(draws, log=Path(asked.log)):
        state = answer["state"]
        counts[state] = counts.get(state, 0) + 1
        first = answer.get("first_difference")
        why = answer.get("why", "") if first is None else f"{first['parameter']}: {first['cause']}"
        print(f"{state:<9} {one}  {why}", flush=True)
        if state in ("different", "failed", "hung"):
            print("\n".join(answer.get("lines", [answer.get("text", "")])), flush=True)
    print("  ".join(f"{state}: {number}" for state, number in sorted(counts.items())))
    return int(any(counts.get(state) for state in ("different", "failed", "hung")))


if __name__ == "__main__":
    sys.exit(main())
