"""The console shows what a rank prints, without what libraries log for their own developers."""

import io
from pathlib import Path

import pytest

from paceline.launch.failures.failure_record import TRACEBACK_MARKER
from paceline.reporting.sinks.log_tail import LogTail

CHATTER = [
    "[W1125 18:09:23.999000 socket.cpp:759] [c10d] The client socket cannot be initialized to connect to (errno: 97).",
    "[rank0]:[W1125 18:09:23.123456789 ProcessGroupNCCL.cpp:4715] [PG ID 0] using GPU 0 as device used by this process",
    "[I1125 18:09:23.000000000 ProcessGroupGloo.cpp:1] started",
    "W1125 18:09:23.999000 31954 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable",
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at /x/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes.",
    "NCCL version 2.27.5+cuda12.9",
    "node1:4711:4720 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>",
]
SHOWN = [
    "step 1 | loss 1.6709",
    "[E1125 18:09:23.999000 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout",
    "[F1125 18:09:23.999000 logging.cpp:1] fatal",
    "node1:4711:4720 [0] transport/net.cc:1 NCCL WARN Call to connect failed",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "  what():  std::bad_alloc",
    "[W] my own warning",
    "W1125 19:50:40.123456 140735 data.py:7] 12 corrupt samples skipped",
    "I1125 19:50:40.123456 140735 train.py:31] wrote torch/weights.cpp: [c10d]",
    "W2 = 17",
    "[Weights] 1125 loaded",
    "/x/site-packages/torch/optim/lr_scheduler.py:1: UserWarning: call optimizer.step() before lr_scheduler.step()",
]


def test_what_libraries_log_stays_in_the_log(tmp_path: Path) -> None:
    lines = [line for pair in zip(CHATTER, SHOWN, strict=False) for line in pair] + SHOWN[len(CHATTER) :]
    (tmp_path / "rank-0.log").write_text("\n".join(lines) + "\n")
    out = io.StringIO()
    tail = LogTail(tmp_path, out=out)
    tail()
    tail.close()
    assert out.getvalue().splitlines() == SHOWN
    assert (tmp_path / "rank-0.log").read_text().splitlines() == lines


@pytest.mark.parametrize(("printed", "shown"), [("step 1\n", "step 1\n"), ("step 1", "step 1\n"), ("a\n\n", "a\n\n")])
def test_a_traceback_leaves_no_empty_line_on_the_screen(tmp_path: Path, printed: str, shown: str) -> None:
    """`print_traceback` begins a new line, in case the job has left one unfinished."""
    (tmp_path / "rank-0.log").write_text(f"{printed}\n{TRACEBACK_MARKER}\nTraceback (most recent call last):\n")
    out = io.StringIO()
    tail = LogTail(tmp_path, out=out)
    tail()
    tail.close()
    assert out.getvalue() == shown


def test_the_log_is_followed_although_its_folder_was_moved_and_a_crash_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with (folder / "rank-0.log").open("w") as log:
        out = io.StringIO()
        tail = LogTail(folder, out=out)
        log.write("step 1\n")
        log.flush()
        tail()
        folder.rename(tmp_path / "moved")
        log.write("step 2\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n")
        log.flush()
        tail()
        log.write('  File "job.py", line 3 in loss\n')
        log.flush()
        tail.close()
    assert out.getvalue().splitlines() == ["step 1", "step 2"]


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_is_no_terminal_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    (tmp_path / "rank-0.log").write_text("step 1\n")
    with (tmp_path / "console.txt").open("w") as out:
        tail = LogTail(tmp_path, out=out)
        tail()
        tail.close()
    assert tail._bar is None and (tmp_path / "console.txt").read_bytes() == b"step 1\n"
