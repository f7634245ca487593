"""Under torchrun each rank writes its log, its activity and its failure into the run folder, as `paceline why` reads them."""

import re
import signal
import subprocess
import sys

import pytest

from tests.commands.test_why import wait_until
from tests.conftest import SMALL_JOB, Shop

LOSS = '    time.sleep(float(os.environ.get("PAUSE", 0)))\n'
NOISY = """
    global calls
    calls += 1
    rank = os.environ["RANK"]
    print(f"hello from {rank}\\n", end="")  # in one write, because those of two ranks mix
    os.system(f"echo child of {rank}")
    if os.environ.get("HANGS") and rank == "1" and calls == 3: time.sleep(3600)  # here
    if rank == "1" and calls == 4: raise ValueError("not today")
"""
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = ["-m", "paceline", "train", "job.py", "--run-dir", "run", "--train.steps", "8", "--data.workers", "0"]
OWN = """
import paceline as pl
from job import make_job
with pl.Run(make_job(), layout="ddp", ranks=2, run_dir="run", settings={"train.steps": 8}) as run:
    for batch in run.batches():
        run.step(batch)
"""


@pytest.fixture
def noisy(shop: Shop) -> Shop:
    """A job whose ranks print, and whose rank 1 raises an exception in its fourth step."""
    shop.write("job.py", SMALL_JOB.replace(LOSS, NOISY) + "\ncalls = 0\n")
    return shop


@pytest.mark.cold
def test_a_failed_run_has_logs_and_a_short_screen(noisy: Shop) -> None:
    ended = noisy.call([*TORCHRUN, *COMMAND], environ={"OMP_NUM_THREADS": "1"})
    folder = noisy.path / "run" / "logs" / "attempt-1"
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert ended.code == 1 and "hello from 0" in ended.out and "child of 0" in ended.out, ended.text
    assert "hello from 1" not in ended.out and "child of 1" not in ended.out, "it would mix with what rank 0 prints"
    assert "hello from 0" in logs[0] and "step 1 " in logs[0] and "hello from 1" not in logs[0]
    assert logs[1].count("hello from 1") == 4 and "child of 1" in logs[1] and "raise ValueError" in logs[1]
    screen = ended.err.partition("torch/distributed/")[0]
    told = (
        r"FAILED at step \d\. rank 1, \S+job\.py:\d+, ValueError: not today\nFull text: run/logs/attempt-1/rank-1\.log"
    )
    assert re.search(told, screen) and "raise ValueError" not in screen and len(screen.splitlines()) < 8, ended.text
    because = "stopped at step 4 because rank 1 failed at step 4: ValueError: not today"
    assert f"traceback : rank 0 {because}" in ended.err or "(SIGTERM)" in ended.err, ended.text
    why = noisy.run("why", "run")
    assert "First error: rank 1, " in why.out and "The other rank stopped because rank 1 failed." in why.out, why.text
    assert "Full text: run/logs/attempt-1/rank-1.log" in why.out


@pytest.mark.cold
def test_the_console_of_a_script_stays_as_it_is(noisy: Shop) -> None:
    noisy.write("own.py", OWN)
    ended = noisy.call([*TORCHRUN, "own.py"], environ={"OMP_NUM_THREADS": "1"})
    assert ended.code == 1 and "hello from 0" in ended.out and ended.out.count("hello from 1") == 4, ended.text
    assert "[rank1]: ValueError: not today" in ended.err
    log = (noisy.path / "run" / "logs" / "attempt-1" / "rank-1.log").read_text()
    assert log.count("hello from 1") == 4 and "ValueError: not today" in log


@pytest.mark.cold
def test_a_rank_that_hangs_is_named_and_a_killed_one_too(noisy: Shop) -> None:
    environ = noisy.environ({"OMP_NUM_THREADS": "1", "HANGS": "1"})
    process = subprocess.Popen(
        [*TORCHRUN, *COMMAND], cwd=noisy.path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    noisy.started.append(process)
    assert process.stderr is not None
    message = ""
    while "to do:" not in message:
        line = process.stderr.readline()
        assert line, message
        message += line
    assert "rank 1 is holding up step 3" in message and "rank 0 waits for it in all_reduce" in message, message
    seen = wait_until(noisy, "run", "hanging")
    assert seen["hang"]["ranks"] == [1] and "time.sleep(3600)" in seen["hang"]["line"]
    (culprit,) = [position["pid"] for position in seen["ranks"] if position["rank"] == 1]
    subprocess.run(["kill", "-9", str(culprit)], check=True)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 1 and re.search(r"^rank 0 stopped at step 3 because rank 1 ", rest, re.MULTILINE), rest
    failure = wait_until(noisy, "run", "failed")["failure"]
    assert failure["rank"] == 1 and failure["step"] == 3 and failure["error"] in ("signal", "exit")
    assert signal.SIGKILL.name in failure["what"] or "without an exception" in failure["what"]
