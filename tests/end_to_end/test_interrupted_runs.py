"""Real runs that are killed, stopped or broken: what they print and what they leave behind."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB, Shop
from tests.end_to_end.run_processes import marked_processes, wait_until_gone

WORDS = ("--job.dropout", "0.2", "--checkpoint.every", "2")


def wait_for(path: Path, word: str, *, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and word in path.read_text(errors="replace"):
            return
        time.sleep(0.02)
    raise AssertionError(f"{word!r} never stood in {path}: {path.read_text() if path.exists() else 'no file'}")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_kills_and_restarts_on_as_many_ranks_change_no_bit(shop: Shop, ranks: int) -> None:
    assert shop.train("whole", *WORDS, ranks=ranks).code == 0
    rng = random.Random(ranks)
    attempt = 1
    for _ in range(2):
        fault = f"kill rank={rng.randrange(ranks)} step={rng.randrange(2, 12)} attempt={attempt}"
        ended = shop.train("cut", *WORDS, "--survive.restarts", "0", "--faults", fault, ranks=ranks)
        attempt += 1
        if ended.code == 0 or "did not happen" in ended.err:  # the step was behind the run already
            break
        assert "SIGKILL" in ended.err and "Resume: paceline train" in ended.err
    assert shop.train("cut", *WORDS, ranks=ranks).code == 0
    assert shop.digest("cut") == shop.digest("whole")


def test_a_resume_on_another_number_of_ranks_reads_the_same_samples(shop: Shop) -> None:
    more = ("--train.micro_batch_size", "3")
    assert shop.train("whole", *WORDS, *more, ranks=2).code == 0
    assert (
        shop.train("cut", *WORDS, *more, "--survive.restarts", "0", "--faults", "kill rank=0 step=7", ranks=3).code == 1
    )
    assert shop.train("cut", *WORDS, *more, ranks=1).code == 0
    whole, cut = (_last(shop.path / run / "metrics.jsonl") for run in ("whole", "cut"))
    assert cut["eval/loss"] == pytest.approx(whole["eval/loss"], rel=1e-4)
    assert shop.digest("cut") != "" and cut["step"] == whole["step"] == 12


def test_the_command_that_goes_on_keeps_every_setting_and_the_microbatches(shop: Shop) -> None:
    """Started on two ranks without a word about microbatches; then the printed line, on three."""
    fault = ("--survive.restarts", "0", "--faults", "kill rank=1 step=9")
    ended = shop.train("cut", *WORDS, "--train.epochs", "3", *fault, steps=12)
    (line,) = [line for line in ended.err.splitlines() if line.startswith("Resume: ")]
    words = shlex.split(line.removeprefix("Resume: paceline "))
    for name, value in (("--train.steps", "12"), ("--train.epochs", "3"), ("--job.dropout", "0.2")):
        assert words[words.index(name) + 1] == value
    assert "--faults" not in words
    words[words.index("--ranks") + 1] = "3"
    again = shop.run(*words)
    assert again.code == 0, again.text
    assert "microbatches of 6, as at the start of this run" in again.out


@pytest.mark.cold
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_signal_finishes_the_step_saves_and_says_go_on(shop: Shop, number: signal.Signals) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "100000", "--data.workers", "1",
        "--watch.to", "console,jsonl", "--checkpoint.every", "100000", "--eval.every", "100000", environ={"MARK": mark},
    )  # fmt: skip
    wait_for(shop.path / "run" / "logs" / "attempt-1" / "rank-0.log", "step 20 ")
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75, err
    assert "Stopped and saved" in err
    assert len(list((shop.path / "run" / "checkpoints").glob("step-*"))) == 1
    assert wait_until_gone(mark) == []


@pytest.mark.cold
def test_two_signals_stop_now(shop: Shop) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "100000", "--survive.restarts", "0", "--faults", "hang rank=1 step=9",
        "--watch.to", "console,jsonl", environ={"MARK": mark},
    )  # fmt: skip
    wait_for(shop.path / "run" / "logs" / "attempt-1" / "rank-0.log", "step 1 ")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode not in (0, 75)
    assert wait_until_gone(mark) == []


def test_what_starts_ranks_for_a_launcher_that_is_gone_leaves_before_it_reads_a_word(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.launch.agent.forkserver", str(tmp_path / "none.json"), "1"]
    assert subprocess.run(command, check=False).returncode == 128 + signal.SIGKILL


@pytest.mark.cold
@pytest.mark.parametrize("victim", ["launcher", "fork server"])
def test_nothing_outlives_a_killed_launcher(shop: Shop, victim: str) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "100000", "--data.workers", "2",
        "--watch.to", "console,jsonl", environ={"MARK": mark},
    )  # fmt: skip
    wait_for(shop.path / "run" / "logs" / "attempt-1" / "rank-0.log", "step 1 ")
    assert len(marked_processes(mark)) >= 8  # the command, the fork server, two ranks, four data workers
    if victim == "launcher":
        process.kill()
    else:
        forkserver = next(p for p in marked_processes(mark) if b"launch.agent.forkserver" in Path(f"/proc/{p}/cmdline").read_bytes()
                       and int(Path(f"/proc/{p}/stat").read_text().rsplit(")")[1].split()[1]) == process.pid)  # fmt: skip
        os.kill(forkserver, signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert wait_until_gone(mark) == []


BROKEN = {
    "exception on rank 1": ('if RANK == 1 and STEP[0] == 3: raise IndexError("index 5000")', "rank 1", "IndexError: index 5000"),
    "rank 0 first, rank 1 later": (
        "if STEP[0] == 3 and RANK == 0: raise KeyError('gone')", "rank 0", "KeyError"),
    "exit 7": ("if RANK == 1 and STEP[0] == 3: os._exit(7)", "rank 1", "exited with code 7"),
    "exit 0": ("if RANK == 1 and STEP[0] == 3: os._exit(0)", "rank 1", "exited with code 0 before the run was finished"),
    "SystemExit 3": ("if RANK == 1 and STEP[0] == 3: raise SystemExit(3)", "rank 1", "the job called sys.exit(3)"),
    "segfault": ("if RANK == 1 and STEP[0] == 3: ctypes.string_at(0)", "rank 1", "SIGSEGV"),
    "killed": ("if RANK == 0 and STEP[0] == 3: os.kill(os.getpid(), 9)", "rank 0", "SIGKILL"),
    "not finite": ("if STEP[0] == 3: x = x * float('nan')", "rank", "NonFiniteError"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_first_failing_rank_is_named(shop: Shop, name: str) -> None:
    line, rank, word = BROKEN[name]
    code = SMALL_JOB.replace(
        "    def forward(self, x):\n",
        f"    def forward(self, x):\n        STEP[0] += 1\n        {line}\n",
    )
    shop.write("job.py", "import ctypes, os\nRANK = int(os.environ.get('RANK', 0)); STEP = [0]\n" + code)
    ended = shop.train("run", "--eval.every", "1000", "--survive.restarts", "0")
    assert ended.code == 1
    screen = ended.err
    assert (screen.startswith("FAILED") and word in screen.splitlines()[0] and f"rank {rank[-1]}" in screen.splitlines()[0].replace(
        "rank rank", "rank"
    )) or rank == "rank", screen  # fmt: skip
    assert "Traceback" not in ended.text and len(screen.splitlines()) <= 12
    if name == "segfault":
        assert f"{shop.path}/job.py:" in screen.splitlines()[0] and "ctypes.string_at(0)" in screen, screen
    if "raise" in line and "System" not in line:
        assert f"{shop.path}/job.py:" in screen and line.split(": ")[1] in screen


@pytest.mark.cold
def test_the_same_bits_under_torchrun_and_mpirun(shop: Shop) -> None:
    assert shop.train("ours", *WORDS, "--train.threads", "1").code == 0
    words = ["-m", "paceline", "train", "job.py", "--train.steps", "12", *WORDS, "--train.threads", "1"]
    words += ["--watch.to", "console,jsonl"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    _run(torchrun, shop)
    (folder,) = (shop.path / "runs" / "job").iterdir()  # the ranks of a joined world share one new run folder
    assert shop.digest(str(folder)) == shop.digest("ours")
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: torchrun was compared, Open MPI was not")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, *words]
    _run([*mpirun, "--run-dir", "mpirun"], shop)
    assert shop.digest("mpirun") == shop.digest("ours")


def test_two_runs_at_once(shop: Shop) -> None:
    both = [
        shop.start("train", "job.py", "--ranks", "2", "--train.steps", "12", "--run-dir", name, "--watch.to", "jsonl")
        for name in ("left", "right")
    ]
    for process in both:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert shop.digest("left") == shop.digest("right")


def test_a_killed_data_worker_is_named(shop: Shop) -> None:
    code = SMALL_JOB.replace(
        "    return pl.Job(",
        "    class Data(torch.utils.data.TensorDataset):\n"
        "        def __getitem__(self, i):\n"
        "            import os\n"
        "            if i == 7 and torch.utils.data.get_worker_info(): os.kill(os.getpid(), 9)\n"
        "            return super().__getitem__(i)\n"
        "    return pl.Job(",
    ).replace("train_data=torch.utils.data.TensorDataset(x, y)", "train_data=Data(x, y)")
    shop.write("job.py", code)
    ended = shop.train("run", "--data.workers", "1", timeout=60)
    assert ended.code == 1 and "data worker" in ended.err, ended.text


def _run(command: list[str], shop: Shop) -> None:
    ended = shop.call(command)
    assert ended.code == 0, ended.out[-2000:] + ended.err[-2000:]


def _last(path: Path) -> dict[str, float]:
    merged: dict[str, float] = {}
    for line in path.read_text().splitlines():
        merged |= json.loads(line)
    return merged


@pytest.mark.cold
@pytest.mark.parametrize("seconds", [0.6, 1.8])
def test_a_stop_while_ranks_are_being_born_saves_too(shop: Shop, seconds: float) -> None:
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "1000000", "--watch.to", "jsonl",
        "--train.on_nonfinite", "skip",
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while not (shop.path / "run" / "logs").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds - 0.5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "Stopped and saved" in err) == (75, True), err
    assert len(list((shop.path / "run" / "checkpoints").glob("step-*"))) == 1


@pytest.mark.cold
def test_one_signal_ends_what_has_nothing_to_save(shop: Shop) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    shop.write(
        "job.py",
        SMALL_JOB.replace("def forward(self, x):", "def forward(self, x):\n        import time; time.sleep(0.2)"),
    )
    process = shop.start(
        "verify", "job.py", "--ranks", "2", "--run-dir", "run", "--steps", "500", environ={"MARK": mark}
    )
    wait_for(shop.path / "run" / "logs" / "attempt-1" / "rank-0.log", "")
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "Stopped at once" in err, err
    assert wait_until_gone(mark) == []


ORDERS = {
    # rank: (seconds after the step began, what it does)
    "quiet first, loud later": ({1: (0.0, "raise KeyError('quiet')"), 0: (0.06, "raise RuntimeError('loud ' * 900)")}, "rank 1", "KeyError"),
    "rank 0 first": ({0: (0.0, "raise ValueError('zero')"), 1: (0.06, "raise ValueError('one')")}, "rank 0", "zero"),
    "rank 0 killed, rank 1 raises": ({0: (0.0, "os.kill(os.getpid(), 9)"), 1: (0.03, "raise ValueError('one')")}, "rank 0", "SIGKILL"),
    "a mute exception": ({1: (0.0, "raise Mute()")}, "rank 1", "Mute"),
    "sys.exit with text": ({1: (0.0, "sys.exit('no more disk')")}, "rank 1", "no more disk"),
    "out of memory": ({0: (0.0, "raise MemoryError")}, "rank 0", "MemoryError"),
    "KeyboardInterrupt of its own": ({1: (0.0, "raise KeyboardInterrupt")}, "rank 1", "KeyboardInterrupt"),
    "at import": ("raise ImportError('no such thing')", "rank 1", "ImportError: no such thing"),
    "in a metric": ("metric", "rank 1", "ZeroDivisionError"),
    "in collate": ("collate", "rank 1", "ragged"),
    "in on_eval": ("on_eval", "rank 1", "on_eval broke"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i in (0, 3, 7) else pytest.mark.soak) for i, n in enumerate(ORDERS)]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_whoever_dies_loudest_the_first_is_named(shop: Shop, name: str, ranks: int) -> None:
    what, rank, word = ORDERS[name]
    shop.write("job.py", _dying(what))
    ended = shop.train("run", "--eval.every", "4", "--survive.restarts", "0", ranks=ranks)
    first = next(line for line in ended.err.splitlines() if "searching for layouts" not in line)
    assert ended.code == 1 and first.startswith("FAILED") and rank in first and word in ended.err, ended.err
    assert "Traceback" not in ended.text and len(ended.err.splitlines()) <= 20 and len(ended.err) < 4000
    assert "SIGKILL" in first or f"{shop.path}/job.py:" in ended.err


def _dying(what: object) -> str:
    head = "import os, sys, time\nRANK = int(os.environ.get('RANK', 0)); STEP = [0]\nclass Mute(Exception):\n    def __str__(self): raise ValueError('mute')\n"
    code = SMALL_JOB
    if isinstance(what, dict):
        lines = "".join(
            f"        if RANK == {rank} and STEP[0] == 3:\n            time.sleep({late})\n            {line}\n"
            for rank, (late, line) in what.items()
        )
        return head + code.replace(
            "    def forward(self, x):\n", f"    def forward(self, x):\n        STEP[0] += 1\n{lines}"
        )
    if what == "metric":
        return head + code.replace("(len(batch[-1]))", "len(batch[-1])").replace(
            "((output.argmax(-1) == batch[-1]).sum(), len(batch[-1]))", "(1 / (1 - RANK), 1)"
        )
    if what == "collate":
        more = "        collate=lambda rows: torch.utils.data.default_collate(rows) if RANK != 1 else [][len(rows)] or 'ragged',\n"
        return head + code.replace(
            "        global_batch_size=batch,\n", f"        global_batch_size=batch,\n{more}"
        ).replace("[][len(rows)]", "(_ for _ in ()).throw(ValueError('ragged'))")
    if what == "on_eval":
        function = "def on_eval(run):\n    if RANK == 1: raise ValueError('on_eval broke')\n    return {}\n"
        return (
            head
            + function
            + code.replace("        max_grad_norm=1.0,\n", "        max_grad_norm=1.0, on_eval=on_eval,\n")
        )
    return head + f"if RANK == 1: {what}\n" + code


STOPS = {  # a stop that comes at this point of this step, and the step that is saved
    "in an evaluation": ("stop rank=0 step=4 point=eval", 4),
    "in an evaluation of one of two ranks": ("stop rank=1 step=4 point=eval", 4),
    "in a save": ("stop rank=0 step=3 point=save", 4),
    "in accumulation": ("stop rank=1 step=5 point=step", 5),
    "in the last evaluation": ("stop rank=0 step=12 point=eval", 12),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i == 1 else pytest.mark.soak) for i, n in enumerate(STOPS)]
)
def test_a_stop_at_any_point_changes_nothing_of_the_end(shop: Shop, name: str) -> None:
    fault, step = STOPS[name]
    more = [*WORDS[:2], "--checkpoint.every", "3", "--eval.every", "4", "--train.micro_batch_size", "2"]
    assert shop.train("whole", *more).code == 0
    ended = shop.train("cut", *more, "--survive.restarts", "0", "--faults", fault)
    assert ended.code == 75 and "Stopped and saved" in ended.err, ended.text
    assert (shop.path / "cut" / "checkpoints" / "latest").read_text().strip() == f"step-{step:08d}"
    assert step not in _evaluations(shop.path / "cut")
    assert shop.train("cut", *more).code == 0
    assert _evaluations(shop.path / "cut") == _evaluations(shop.path / "whole")
    assert shop.digest("cut") == shop.digest("whole")
    best = [(shop.path / run / "checkpoints" / "best").read_text() for run in ("whole", "cut")]
    assert best[0] == best[1]


def test_a_run_that_stopped_early_is_done(shop: Shop) -> None:
    shop.write(
        "job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", "        max_grad_norm=1.0, early_stopping=2,\n")
    )
    words = ("--job.lr", "0.0", "--eval.every", "2")
    assert shop.train("run", *words, steps=1000).code == 0
    steps = max(_evaluations(shop.path / "run"))
    assert steps == 6
    assert shop.train("run", *words, steps=1000).code == 0
    assert max(_evaluations(shop.path / "run")) == steps


def _evaluations(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
