"""Two sites joined by a slow line: bytes, time and loss of DiLoCo, local SGD and `--compress` beside ddp.

    python benchmarks/sites.py                                  # as root: two network namespaces and a token bucket
    python benchmarks/sites.py --updates 3000 --line 20mbit --updates-on-line 52
    python benchmarks/sites.py --rules diloco,every=500 local,every=50
    python benchmarks/sites.py --rules local,every=1000 --longer 1.5     # to the loss that sync comes to
    python benchmarks/sites.py --rules --compress bf16 int8 --updates 500
    python benchmarks/sites.py --rules --compress topk --updates 300 --updates-on-line 12 --compressed-on-line 302

Each site is one process (gloo, CPU, one thread) in a namespace of its own; bytes are those that one end of the line has
sent and heard. Training is the text example, each batch of 32 shared out. `sync` and `--compress` run their whole
length without the line, for the loss and the seconds on loopback, and some steps over the line: their bytes and seconds
times all steps are those of the row. What a run costs beside its steps (start, start weights, evaluation, save) is
found from a run of two steps, and taken off. Losses are those of the held-out text at the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

JOB = "paceline.examples.text"
SPACES, ENDS, ADDRESSES = ("paceline-a", "paceline-b"), ("line-a", "line-b"), ("10.83.7.1", "10.83.7.2")
PORT = 29_611


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of a run: its seconds, the bytes that one end has sent and heard, metrics of the last evaluation."""

    seconds: float
    num_bytes: int
    steps: int
    metrics: dict[str, float]


@contextmanager
def line(rate: str) -> Iterator[None]:
    """Two namespaces with a wire between them."""
    unmake()
    for space in SPACES:
        run("ip", "netns", "add", space)
        run("ip", "netns", "exec", space, "ip", "link", "set", "lo", "up")
    run("ip", "link", "add", ENDS[0], "netns", SPACES[0], "type", "veth", "peer", "name", ENDS[1], "netns", SPACES[1])
    for space, end, address in zip(SPACES, ENDS, ADDRESSES, strict=True):
        inside = ("ip", "netns", "exec", space)
        run(*inside, "ip", "address", "add", f"{address}/24", "dev", end)
        run(*inside, "ip", "link", "set", end, "up")
        if rate:
            run(
                *inside, "tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", "64kb", "latency", "1s"
            )
    try:
        yield
    finally:
        unmake()


def unmake() -> None:
    """Whatever an earlier run has left too."""
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)


def run(*words: str) -> str:
    """A command that must work."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def num_bytes() -> int:
    """Over the line, both ways, as its first end has counted them."""
    names = [f"/sys/class/net/{ENDS[0]}/statistics/{way}_bytes" for way in ("rx", "tx")]
    return sum(int(run("ip", "netns", "exec", SPACES[0], "cat", name)) for name in names)


def train(rule: str, *, steps: int, folder: Path, over_line: bool, words: Sequence[str]) -> Ran:
    """One run of two ranks."""
    command = [sys.executable, "-W", "ignore", "-m", "paceline", "train", JOB, "--update", rule, "--ranks", "2"]
    command += ["--run-dir", str(folder), "--train.steps", str(steps), "--train.threads", "1", "--data.workers", "0"]
    command += ["--train.check_every", "0", "--checkpoint.every", str(steps), "--eval.every", str(steps), *words]
    before, began = num_bytes() if over_line else 0, time.perf_counter()
    ranks = []
    for rank in (0, 1):
        inside = ["ip", "netns", "exec", SPACES[rank]] if over_line else []
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": ADDRESSES[0] if over_line else "127.0.0.1", "MASTER_PORT": str(PORT)}
        own |= {"GLOO_SOCKET_IFNAME": ENDS[rank] if over_line else "lo", "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([*inside, *command], env=os.environ | own, stdout=subprocess.DEVNULL))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{rule} failed; see {folder}")
    seconds = time.perf_counter() - began
    sent = num_bytes() - before if over_line else 0
    events = [json.loads(text) for text in (folder / "events.jsonl").read_text().splitlines()]
    metrics = next(event["metrics"] for event in reversed(events) if event["event"] == "EvalDone")
    return Ran(seconds=seconds, num_bytes=sent, steps=steps, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of a whole run, without what it costs beside its steps; `loopback` is seconds where there is no line."""

    name: str
    num_bytes: int
    seconds: float
    loss: float
    loopback: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs have in common."""

    asked: argparse.Namespace
    folder: Path

    def stretch(self, name: str, words: Sequence[str] = (), *, updates_on_line: int) -> tuple[Row, Ran]:
        """Of what sends the same in each step: two runs on the line, two without; and what a run costs beside steps."""
        asked, own = self.asked, [*own_words(self.asked), *words]

        def ran(steps: int, *, over_line: bool) -> Ran:
            folder = self.folder / f"{name.replace(',', '-')}-{steps}-{over_line}"
            return train("sync", steps=steps, folder=folder, over_line=over_line, words=own)

        few, many = ran(2, over_line=True), ran(updates_on_line, over_line=True)
        short, whole = ran(2, over_line=False), ran(asked.updates, over_line=False)
        steps = many.steps - few.steps
        seconds, sent = (many.seconds - few.seconds) / steps, (many.num_bytes - few.num_bytes) / steps
        row = Row(
            name=name,
            num_bytes=round(sent * asked.updates),
            seconds=seconds * asked.updates,
            loss=whole.metrics["loss"],
            loopback=(whole.seconds - short.seconds) * asked.updates / (asked.updates - 2),
        )
        beside = Ran(seconds=few.seconds - 2 * seconds, num_bytes=few.num_bytes - round(2 * sent), steps=0, metrics={})
        return row, beside

    def apart(self, rule: str, beside: Ran) -> Row:
        """Of a rule that sends now and then: the whole run on the line."""
        folder, updates = self.folder / rule.replace(",", "-"), round(self.asked.updates * self.asked.longer)
        words = own_words(self.asked, updates=updates)
        found = train(rule, steps=updates, folder=folder, over_line=True, words=words)
        return Row(
            name=rule if self.asked.longer == 1.0 else f"{rule} x {self.asked.longer:g}",
            num_bytes=found.num_bytes - beside.num_bytes,
            seconds=found.seconds - beside.seconds,
            loss=found.metrics["loss"],
        )


def own_words(asked: argparse.Namespace, *, updates: int | None = None) -> list[str]:
    """Settings for every run; the learning rate falls until its end."""
    return [
        "--job.steps",
        str(updates or asked.updates),
        *(word for text in asked.words for word in text.split("=", 1)),
    ]


def tell(row: Row, first: Row) -> None:
    """Beside sync."""
    loopback = "" if row.loopback is None else f"{row.loopback:9.1f}"
    print(
        f"{row.name:28s} {row.num_bytes:14,d} {first.num_bytes / max(row.num_bytes, 1):8.1f} "
        f"{row.seconds:9.1f} {first.seconds / row.seconds:8.2f} {loopback:>9s} "
        f"{row.loss:9.4f} {row.loss / first.loss - 1:+8.2%}",
        flush=True,
    )


def main() -> int:
    """Print a row for each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="*", default=["local,every=50", "diloco,every=600"])
    parser.add_argument("--compress", nargs="*", default=[], help="of sync, as bf16 int8 topk,ratio=0.05")
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--longer", type=float, default=1.0, help="updates of --rules, as a multiple of --updates")
    parser.add_argument("--updates-on-line", type=int, default=52, help="of sync, for its bytes and time")
    parser.add_argument("--compressed-on-line", type=int, help="of --compress, where it is so quick that it takes more")
    parser.add_argument("--line", default="20mbit")
    parser.add_argument("--words", nargs="*", default=[], help="settings for all, as --job.width=64")
    asked = parser.parse_args()
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    folder = Path(tempfile.mkdtemp(prefix="paceline-sites-"))
    print(f"{asked.updates} updates, two sites, {asked.line}", flush=True)
    heads = ("bytes", "fewer", "seconds", "faster", "loopback", "loss", "higher")
    print(f"{'rule':28s} " + " ".join(f"{head:>{w}s}" for head, w in zip(heads, (14, 8, 9, 8, 9, 9, 8), strict=True)))
    bench = Bench(asked=asked, folder=folder)
    try:
        with line(asked.line):
            first, beside = bench.stretch("sync", updates_on_line=asked.updates_on_line)
            tell(first, first)
            for rule in asked.rules:
                tell(bench.apart(rule, beside), first)
            for how in asked.compress:
                updates = asked.compressed_on_line or asked.updates_on_line
                tell(bench.stretch(how, ("--compress", how), updates_on_line=updates)[0], first)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
