"""Step times that `plan --cluster here` says, against those of real runs, and whether what it chooses is the quickest.

    python benchmarks/steps.py --ranks 1 2 4                      # all jobs, three to five minutes each
    python benchmarks/steps.py --ranks 2 --only 'llama*' --out steps.jsonl
    python benchmarks/steps.py --read steps.jsonl                 # the figures of what was measured before
    python benchmarks/steps.py --ranks 2 --line 100mbit --only 'llama*'    # as root: ranks in two network namespaces

Every job is planned (a minute for the probe and for layouts that are timed); then the best of each family and what was
timed to be nearly as quick run as `paceline train`, twice, in turn: what took 1.8 times as long as the quickest when it
was timed, or was not timed for that, is not run. A step is the median of what the run itself logged, without the first
ones. The noise is how far the first two runs are apart. Where what was chosen seems more than 5 % slower than the
quickest, these two run twice more: of five layouts one is the quickest by chance. The first two runs' word is told too.

Seconds are given twice: as the clock says, and at the pace that the cores had meanwhile (`benchmarks.pace`), as on a
shared host a core is a quarter slower in one minute than in the next; so are order and choice.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.pace import Pace  # noqa: E402
from benchmarks.sites import ADDRESSES, ENDS, PORT, SPACES, line  # noqa: E402
from benchmarks.step_rows import CLOSE, PASSES, Row, lost, recommended, show, summary  # noqa: E402

_WARM = 4  # steps of a run
_SECONDS = 10.0  # of timed steps in a run
_FEWEST, _MOST = 6, 60  # steps
_NEAR, _ROWS = 1.2, 5  # times the quickest; layouts
_FAR = 1.8  # times the quickest, after which nobody asks


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job to plan: a family of `benchmarks.memory.jobs` with its parameters, and other settings."""

    family: str
    batch: int = 8
    job: Mapping[str, Any] = field(default_factory=dict)
    more: Sequence[str] = ()

    def __str__(self) -> str:
        words = [self.family, f"b{self.batch}", *(f"{name}={value}" for name, value in self.job.items()), *self.more]
        return " ".join(words)

    def words(self) -> list[str]:
        """To type after the verb."""
        own = [f"--job.{name}={value}" for name, value in self.job.items()]
        return [f"benchmarks.memory.jobs:{self.family}", f"--train.global_batch_size={self.batch}", *own, *self.more]


def jobs() -> list[Planned]:
    """Blocks that are many or few, wide or narrow; weights that weigh much or little against activations."""
    return [
        Planned(family="llama", batch=16, job={"depth": 12}),
        Planned(family="llama", batch=8, job={"width": 512, "depth": 6, "length": 64}),
        Planned(family="llama", batch=4, job={"depth": 16, "length": 256}),
        Planned(family="llama", batch=32, job={"width": 128, "depth": 8}),
        Planned(family="llama", batch=8, job={"depth": 8, "vocabulary": 16384}),
        Planned(family="llama", batch=16, job={"depth": 8}, more=("--train.precision=bf16",)),
        Planned(family="gpt2", batch=16, job={"depth": 12}),
        Planned(family="gpt2", batch=8, job={"width": 512, "depth": 8, "length": 64}),
        Planned(family="gpt2", batch=4, job={"depth": 8, "length": 256, "optimizer": "sgd"}),
        Planned(family="bert", batch=16, job={"depth": 12}),
        Planned(family="bert", batch=8, job={"depth": 8, "width": 384}),
        Planned(family="t5", batch=8, job={"depth": 6}),
        Planned(family="t5", batch=16, job={"depth": 3}),
        Planned(family="vit", batch=16, job={"depth": 8}),
        Planned(family="vit", batch=8, job={"depth": 12, "width": 384}),
        Planned(family="mixtral", batch=8, job={"depth": 6}),
        Planned(family="mixtral", batch=16, job={"optimizer": "sgd"}),
        Planned(family="resnet", batch=16, job={"optimizer": "sgd"}),
        Planned(family="resnet", batch=8, job={"side": 64, "optimizer": "sgd"}),
        Planned(family="unet", batch=8),
        Planned(family="lstm", batch=32, job={"optimizer": "sgd"}),
        Planned(family="mlp", batch=256, job={"depth": 12}),
        Planned(family="nano", batch=8, job={"depth": 8}),
        Planned(family="encoder", batch=16, job={"depth": 8}),
    ]


class Bench:
    """How commands are run: as processes of this machine, or one in each of two namespaces."""

    def __init__(self, ranks: int, pace: Pace, *, over_line: bool) -> None:
        self.ranks, self.pace, self.over_line = ranks, pace, over_line
        self._environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent)])}

    def planned(self, job: Planned) -> dict[str, Any]:
        """What `paceline plan --json` answers."""
        with tempfile.TemporaryDirectory(prefix="steps-") as folder:
            said = self._run("plan", [*job.words(), "--cluster=here", "--json", f"--run-dir={folder}/run"])
        found: dict[str, Any] = json.loads(said)
        return found

    def trained(self, job: Planned, layout: str, settings: Mapping[str, str], *, guess: float) -> tuple[float, float]:
        """Seconds of a step of a real run, and the cores' pace meanwhile."""
        steps = _WARM + min(_MOST, max(_FEWEST, round(_SECONDS / guess)))
        with tempfile.TemporaryDirectory(prefix="steps-") as folder:
            own = [f"--layout={layout}", f"--run-dir={folder}/run", f"--train.steps={steps}", "--log.every=1"]
            own += [f"--checkpoint.every={steps + 1}", "--checkpoint.consolidated=none"]
            own += ["--train.check_every=0", *(f"--{name}={value}" for name, value in settings.items())]
            self._run("train", [*job.words(), *own])
            events = [json.loads(text) for text in (Path(folder) / "run/events.jsonl").read_text().splitlines()]
        done = [event for event in events if event["event"] == "StepDone"][_WARM - 1 :]
        taken = median(event["step_seconds"] for event in done[1:])
        return taken, self.pace.of(done[0]["time"], done[-1]["time"])

    def _run(self, verb: str, words: Sequence[str]) -> str:
        command = [sys.executable, "-W", "ignore", "-m", "paceline", verb, *words]
        if not self.over_line:
            command.append(f"--ranks={self.ranks}")
            done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False)
            return _good(done.returncode, done.stdout, done.stderr)
        command.append("--train.threads=1")  # each stands for a machine of its own, and they share the cores
        ranks = []
        for rank in (0, 1):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            own |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": ENDS[rank]}
            own |= {"OMP_NUM_THREADS": "1"}
            inside = ["ip", "netns", "exec", SPACES[rank], *command]
            ranks.append(
                subprocess.Popen(
                    inside, env=self._environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        told = [rank.communicate() for rank in ranks]
        return _good(max(rank.returncode for rank in ranks), *told[0])


def _good(code: int, out: str, error: str) -> str:
    if code:
        raise SystemExit(f"exit code {code}\n{out[-2000:]}\n{error[-2000:]}")
    return out


def measured(bench: Bench, job: Planned) -> dict[str, Any]:
    """One job: the plan, and real runs of what it may have chosen."""
    began = time.monotonic()
    plan = bench.planned(job)
    planned_seconds = time.monotonic() - began
    chosen = _to_run(plan)
    taken: list[list[tuple[float, float]]] = [[] for _ in chosen]

    def run(which: Iterable[int]) -> None:
        for place in which:
            one = chosen[place]
            own = bench.trained(job, one["layout"], one["settings"], guess=one["step_seconds"])
            taken[place].append(own)

    for _ in range(PASSES):
        run(range(len(chosen)))
    rows = [_row(one, own, bench.pace) for one, own in zip(chosen, taken, strict=True)]
    found = {"recommended": plan["recommended"], "settings": plan["plans"][0]["settings"]}
    paced = [row.paced() for row in rows]
    if lost(found, paced) > CLOSE:
        best = min(range(len(paced)), key=lambda place: paced[place].seconds)
        for _ in range(PASSES):
            run((paced.index(recommended(found, paced)), best))
        rows = [_row(one, own, bench.pace) for one, own in zip(chosen, taken, strict=True)]
    return {
        "job": str(job),
        "ranks": bench.ranks,
        "line": bench.over_line,
        "plan_seconds": planned_seconds,
        **found,
        "rows": [asdict(row) for row in rows],
    }


def _row(one: Mapping[str, Any], taken: Sequence[tuple[float, float]], pace: Pace) -> Row:
    return Row(
        layout=one["layout"],
        settings=one["settings"],
        said=one["step_seconds"],
        spread=one["spread"],
        steps=one["steps"],
        taken=[seconds for seconds, _ in taken],
        pace=pace.of(*one["between"]),
        paces=[own for _, own in taken],
    )


def _to_run(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of what was timed what is recommended, the best of each family, and what is near the best of all."""
    first = (plan["recommended"], plan["plans"][0]["settings"])
    timed = sorted(plan["timed"], key=lambda one: one["step_seconds"])
    best = {(row["layout"], str(row["settings"])) for row in plan["plans"] if row["fits"]}
    near = [one for one in timed if one["step_seconds"] <= _NEAR * timed[0]["step_seconds"]][:_ROWS]
    timed = [one for one in timed if one["step_seconds"] <= _FAR * timed[0]["step_seconds"]]
    found = [one for one in timed if one in near or (one["layout"], str(one["settings"])) in best]
    return sorted(found, key=lambda one: (one["layout"], one["settings"]) != first)[:_ROWS]


def main() -> int:
    """Measure, or read what was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="*", help="jobs whose name is like this")
    parser.add_argument("--out", type=Path, help="lines of JSON are added to it")
    parser.add_argument("--read", type=Path, help="only the figures of such a file")
    parser.add_argument("--line", default="", help="ranks in two namespaces joined by so quick a line: 100mbit")
    asked = parser.parse_args()
    found = [json.loads(text) for text in asked.read.read_text().splitlines()] if asked.read else []
    if not asked.read:
        with line(asked.line) if asked.line else nullcontext(), Pace() as pace:
            for ranks in [2] if asked.line else asked.ranks:
                for job in (one for one in jobs() if fnmatch(str(one), asked.only)):
                    found.append(measured(Bench(ranks, pace, over_line=bool(asked.line)), job))
                    print(show(found[-1]), flush=True)
                    if asked.out:
                        with asked.out.open("a") as file:
                            file.write(json.dumps(found[-1]) + "\n")
    else:
        print("\n".join(map(show, found)))
    print("\n".join(summary(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
