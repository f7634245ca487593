"""Break uploads to a local S3 server in every way, and see what the screen says and whether anything is lost.

    python benchmarks/remote_checkpoints.py                 # all situations, on two ranks
    python benchmarks/remote_checkpoints.py --ranks 1 --only killed away
    python benchmarks/remote_checkpoints.py --megabytes 50 --only killed

Each situation trains the job of this file to step 24 with a save every 4 steps. The server (moto) runs in a process of
its own, behind a gate that can refuse connections or stop at a request. A row has the exit codes of the situation's
commands, what the screen said, the newest checkpoint that a reader of the bucket found right after the fault, and
whether the final weights have the bits of the undisturbed run. A killed run is continued twice: on its own disk, and on
an empty one.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl

STEPS, EVERY = 24, 4
PAUSE = float(os.environ.get("PAUSE", "0"))
INPUTS, CLASSES = 32, 8
HIDDEN = int(os.environ.get("HIDDEN", "256"))
LAST = f"step-{STEPS:08d}"


def hidden_of(megabytes: float) -> int:
    """Return the width whose checkpoint has that size: the weights and AdamW's two moments, four bytes each."""
    return round(megabytes * 1e6 / (3 * 4 * (INPUTS + 1 + CLASSES)))


def loss(output: Tensor, batch: Any) -> Any:
    time.sleep(PAUSE)
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def make_job() -> pl.Job:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, INPUTS, generator=generator), torch.randint(0, CLASSES, (96,), generator=generator)
    return pl.Job(
        model=lambda: nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Dropout(0.1), nn.Linear(HIDDEN, CLASSES)),
        loss=loss,
        train_data=torch.utils.data.TensorDataset(x, y),
        optimizer=lambda named: torch.optim.AdamW((p for _, p in named), lr=1e-2),
        global_batch_size=16,
    )


@dataclass
class Row:
    """What one situation showed."""

    name: str
    codes: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    newest: str = ""
    digests: list[str] = field(default_factory=list)


class Bench:
    """The server, a folder for runs, and the command."""

    def __init__(self, server: Any, folder: Path, *, ranks: int, hidden: int) -> None:
        self.server = server
        self.folder = folder
        self.ranks = ranks
        self.hidden = hidden
        self.run, self._number = "", 0

    def begin(self, name: str) -> Row:
        self._number += 1
        self.run = f"run-{self._number}"
        return Row(name)

    @property
    def remote(self) -> str:
        return f"bucket/{self.run}"

    def command(self, *more: str, steps: int = STEPS, url: str = "s3://bucket") -> list[str]:
        return [
            sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--ranks", str(self.ranks),
            "--run-dir", self.run, "--train.steps", str(steps), "--checkpoint.every", str(EVERY),
            "--watch.to", "console,jsonl", *(["--checkpoint.remote", url] if url else []), *more,
        ]  # fmt: skip

    def environ(self, pause: float = 0.0) -> dict[str, str]:
        settings = {"PAUSE": str(pause), "HIDDEN": str(self.hidden), "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
        return {**os.environ, **self.server.environ, **settings}

    def train(self, row: Row, *more: str, said: str = "", steps: int = STEPS, url: str = "s3://bucket") -> str:
        """Run the command to its end, and note its exit code and the first line with `said`."""
        done = subprocess.run(
            self.command(*more, steps=steps, url=url), cwd=self.folder, env=self.environ(), capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        self.note(row, done.returncode, done.stdout + done.stderr, said)
        return done.stdout + done.stderr

    def note(self, row: Row, code: int, text: str, said: str) -> None:
        row.codes.append(code)
        if said:
            row.said.append(next((line.strip() for line in text.splitlines() if said in line), f"NOT SAID: {said}"))

    def start(self, *, pause: float) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(), cwd=self.folder, env=self.environ(pause), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip

    def digest(self) -> str:
        path = self.folder / self.run / "weights.json"
        return str(json.loads(path.read_text())["digest"]) if path.exists() else "none"

    def lose_disk(self) -> None:
        shutil.rmtree(self.folder / self.run)


def undisturbed(bench: Bench) -> Row:
    row = bench.begin("undisturbed, without a store")
    bench.train(row, url="")
    row.digests.append(bench.digest())
    return row


def empty_disk(bench: Bench) -> Row:
    row = bench.begin("empty disk: the run folder is gone after step 12")
    bench.train(row, steps=12)
    row.newest = bench.server.latest(bench.remote)
    bench.lose_disk()
    bench.train(row, said="downloaded ")
    row.digests.append(bench.digest())
    return row


def killed(bench: Bench, part: str, *, after: int = 0) -> Row:
    what = f"half of {part}" if after else part
    row = bench.begin(f"killed -9 while {what} of step 12 is uploaded")
    path = "latest" if part == "latest" else f"step-00000012/{part}"
    process = bench.start(pause=0.15)
    bench.server.wait_for_latest(bench.remote, "step-00000008")
    bench.server.gate.hold_at(f"PUT /{bench.remote}/checkpoints/{path}", after=after)
    bench.server.gate.wait_until_held()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    row.codes.append(process.returncode)
    bench.server.gate.close()
    bench.server.gate.open()
    row.newest = bench.server.latest(bench.remote)
    shutil.move(bench.folder / bench.run, bench.folder / "kept")
    bench.train(row, said="downloaded ")
    row.digests.append(bench.digest())
    bench.lose_disk()
    shutil.move(bench.folder / "kept", bench.folder / bench.run)
    bench.train(row, said="resumed: ")
    row.digests.append(bench.digest())
    return row


def away_in_the_middle(bench: Bench) -> Row:
    row = bench.begin("server away from step 8 to the end, and back after it")
    process = bench.start(pause=0.15)
    bench.server.wait_for_latest(bench.remote, "step-00000004")
    bench.server.gate.close()
    log = bench.folder / bench.run / "logs" / "attempt-1" / "rank-0.log"
    while f"saved {LAST}" not in log.read_text():
        time.sleep(0.05)
    row.newest = bench.server.latest(bench.remote)
    time.sleep(1.5)
    bench.server.gate.open()
    out, _ = process.communicate(timeout=120)
    bench.note(row, process.returncode, out, "not uploaded yet")
    bench.note(row, bench.server.latest(bench.remote) != LAST, out, "can be written again")
    row.codes.pop()
    row.digests.append(bench.digest())
    return row


def away_at_the_end(bench: Bench) -> Row:
    row = bench.begin("server away from step 8, and not back before the run ends")
    bench.train(row, steps=8)
    bench.server.gate.close()
    bench.train(row, "--checkpoint.remote_timeout", "2", said="is only on disk")
    row.newest = bench.server.latest(bench.remote)
    row.digests.append(bench.digest())
    bench.server.gate.open()
    bench.train(row, said=f"uploaded s3://{bench.remote}/checkpoints/{LAST}")
    row.digests.append(bench.digest())
    return row


def away_at_the_start(bench: Bench) -> Row:
    row = bench.begin("server away at the start")
    bench.server.gate.close()
    bench.train(row, said="First error")
    bench.server.gate.open()
    bench.train(row)
    row.digests.append(bench.digest())
    return row


def wrong_credentials(bench: Bench) -> Row:
    row = bench.begin("wrong credentials")
    bench.server.check_credentials(True)
    text = bench.train(row, said="First error")
    bench.server.check_credentials(False)
    files = [path for path in bench.folder.rglob("*") if path.is_file()]
    secret = bench.server.environ["AWS_SECRET_ACCESS_KEY"]
    row.said.append(
        f"files with the secret: {sum(secret.encode() in f.read_bytes() for f in files) + (secret in text)}"
    )
    bench.train(row)
    row.digests.append(bench.digest())
    return row


def missing_bucket(bench: Bench) -> Row:
    row = bench.begin("missing bucket")
    bench.train(row, said="First error", url="s3://no-such-bucket")
    bench.train(row)
    row.digests.append(bench.digest())
    return row


def half_an_object(bench: Bench) -> Row:
    row = bench.begin("half an object in the newest checkpoint, empty disk")
    bench.train(row, steps=12)
    file = f"{bench.remote}/checkpoints/step-00000012/optimizer.safetensors"
    content = bench.server.read(file)
    bench.server.write(file, content[: len(content) // 2])
    row.newest = bench.server.latest(bench.remote)
    bench.lose_disk()
    bench.train(row, said="refused ")
    row.digests.append(bench.digest())
    return row


def flipped_bit(bench: Bench) -> Row:
    row = bench.begin("a flipped bit in the newest checkpoint, empty disk")
    bench.train(row, steps=12)
    file = f"{bench.remote}/checkpoints/step-00000012/model.safetensors"
    content = bytearray(bench.server.read(file))
    content[-100] ^= 1
    bench.server.write(file, bytes(content))
    row.newest = bench.server.latest(bench.remote)
    bench.lose_disk()
    bench.train(row, said="refused ")
    row.digests.append(bench.digest())
    return row


def situations() -> list[Callable[[Bench], Row]]:
    parts = ("model.safetensors", "optimizer.safetensors", "manifest.json", "latest")
    return [
        empty_disk,
        *(lambda bench, part=part: killed(bench, part) for part in parts),
        lambda bench: killed(bench, "model.safetensors", after=bench.hidden * (INPUTS + 1 + CLASSES) * 4 // 2),
        away_in_the_middle,
        away_at_the_end,
        away_at_the_start,
        wrong_credentials,
        missing_bucket,
        half_an_object,
        flipped_bit,
    ]


def print_row(row: Row, reference: str) -> None:
    equal = sum(digest == reference for digest in row.digests)
    said = "<br>".join(line.replace("|", "/") for line in row.said)
    codes = ", ".join(map(str, row.codes))
    print(f"| {row.name} | {codes} | {said} | {row.newest or '-'} | {equal} of {len(row.digests)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, help="size of a checkpoint; without it, 0.13")
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of situations")
    options = parser.parse_args()
    hidden = hidden_of(options.megabytes) if options.megabytes else HIDDEN
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root))
    from tests.trainer.saving.s3_server import S3Server

    server = S3Server.start()
    server.write("bucket")
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-remote-") as folder:
            shutil.copy(__file__, Path(folder) / "job.py")
            bench = Bench(server, Path(folder), ranks=options.ranks, hidden=hidden)
            first = undisturbed(bench)
            reference = first.digests[0]
            print("| situation | exit codes | the screen | newest in the bucket after the fault | digests equal |")
            print("| --- | --- | --- | --- | --- |")
            print_row(first, reference)
            rows = [first]
            for situation in situations():
                name = getattr(situation, "__name__", "").replace("_", " ").replace("<lambda>", "killed")
                if options.only and not any(word in name for word in options.only):
                    continue
                rows.append(situation(bench))
                print_row(rows[-1], reference)
    finally:
        server.stop()
    lost = sum(digest != reference for row in rows for digest in row.digests)
    unsaid = sum("NOT SAID" in line for row in rows for line in row.said)
    print(f"\n{len(rows)} situations; runs with other weights: {lost}; messages that were missing: {unsaid}")
    return int(bool(lost or unsaid))


if __name__ == "__main__":
    sys.exit(main())
