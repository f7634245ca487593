"""A closed terminal or a reader that leaves early ends no run and changes no exit code."""

import errno
import io
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.console.output import print_line
from paceline.reporting.sinks.jsonl import iter_records
from paceline.reporting.sinks.log_tail import LogTail
from tests.conftest import SMALL_JOB, Shop

TRAIN = ("train", "job.py", "--ranks", "2", "--train.steps", "8", "--log.every", "1", "--run-dir", "run")


@pytest.mark.parametrize(
    "rest",
    [
        "| head -1",
        ">&- 2>&-",
        *(pytest.param(rest, marks=pytest.mark.soak) for rest in ("| true", ">&-", "2>&1 | head -2")),
    ],
)
def test_nobody_reads_and_the_run_goes_on(shop: Shop, rest: str) -> None:
    code, said, err = shell(shop, TRAIN, rest)
    assert code == "0" and "Traceback" not in err and "BrokenPipe" not in err, err
    assert rest.startswith(">&-") or "console can't be written" in (shop.path / "run" / "events.jsonl").read_text()
    assert (shop.path / "run" / "weights.json").exists()
    assert said.count("\n") <= 2


class Refusing(io.StringIO):
    """A terminal that can't be written, for one reason or another."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))

    def fileno(self) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EAGAIN, errno.EBADF]
)
def test_a_console_that_can_not_be_written_raises_nothing_and_leaves_word(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs" / "attempt-1"
    folder.mkdir(parents=True)
    (tmp_path / "events.jsonl").touch()
    (folder / "rank-0.log").write_text("step 1\nstep 2\nand more")
    tail = LogTail(folder, out=Refusing(number))
    tail()
    tail.close()
    print_line("more", Refusing(number))
    told = (tmp_path / "events.jsonl").read_text()
    silently = number in (errno.EIO, errno.EPIPE)  # the reader has left
    assert silently is (capsys.readouterr().err == "")
    assert os.strerror(number) in told


def test_a_run_goes_on_where_the_disk_of_its_log_is_full(shop: Shop) -> None:
    code, _, err = shell(shop, TRAIN, "> /dev/full")
    assert code == "0" and "Traceback" not in err and (shop.path / "run" / "weights.json").exists()
    assert note_of_dropped(shop.path / "run")["level"] == "warning"
    assert err.startswith("output can't be written and is dropped: No space left on device"), err
    code, _, err = shell(shop, TRAIN, "> /dev/full 2>&1")
    assert code == "0"


@pytest.mark.parametrize("rest", ["> /dev/full", pytest.param("| head -1", marks=pytest.mark.soak)])
def test_a_rank_of_another_launcher_records_that_its_console_can_not_be_written(shop: Shop, rest: str) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    code, _, err = shell(shop, tuple(word for word in TRAIN if word not in ("--ranks", "2")), rest, **world)
    assert code == "0" and "Traceback" not in err, err
    assert "No space left on device" in note_of_dropped(shop.path / "run")["text"] or rest != "> /dev/full"


def note_of_dropped(run: Path) -> dict[str, Any]:
    """The one event that says that the console can't be written."""
    (found,) = [event for event in iter_records(run / "events.jsonl") if "console can't be written" in str(event)]
    return found


def test_a_pipe_that_is_not_ready_is_waited_for() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    found = bytearray()

    def read() -> None:
        while block := os.read(reads, 1 << 16):
            found.extend(block)

    reader = threading.Timer(0.2, read)
    reader.start()
    with os.fdopen(writes, "w") as stream:
        print_line("x" * 300_000, stream)  # more than a pipe holds while nobody reads
        print_line("!", stream)
    reader.join()
    os.close(reads)
    assert found.endswith(b"x\n!\n")


EVIL = "a\x1b]0;owned\x07b\x1b[2Jc\x9b31md\re\x00f\u202eg\x7fh"


def test_nothing_of_a_stranger_commands_the_terminal() -> None:
    out = io.StringIO()
    print_line(f"✓ {EVIL}\n\tüñ语", out)
    assert out.getvalue() == "✓ a\\x1b]0;owned\\x07b\\x1b[2Jc\\x9b31md\\x0de\\x00f\\u202eg\\x7fh\n\tüñ语\n"
    assert all(mark in "\n\t" or mark.isprintable() for mark in out.getvalue())


def test_what_a_job_prints_keeps_its_colours_and_its_bars_alone(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text(f"\x1b[31mred\x1b[0m\r50%|###\n{EVIL}\n")
    out = io.StringIO()
    LogTail(tmp_path, out=out).close()
    first, second, _ = out.getvalue().split("\n")
    assert first == "\x1b[31mred\x1b[0m\r50%|###"
    assert "\x1b" not in second and "\x07" not in second and "\x9b" not in second and "\u202e" not in second


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_marks_that_a_terminal_lacks_are_said_with_others(tmp_path: Path, encoding: str) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_line("✓ one × 2, 语", terminal)
    assert terminal.buffer.getvalue() == {"latin-1": "ok one × 2, ?\n", "ascii": "ok one x 2, ?\n"}[encoding].encode(
        encoding
    )
    (tmp_path / "rank-0.log").write_text("✓ said\nby a rank ✗", encoding="utf-8")
    LogTail(tmp_path, out=terminal).close()
    terminal.flush()
    assert terminal.buffer.getvalue().endswith(b"ok said\nby a rank x\n")


def test_a_run_ends_well_on_a_terminal_of_another_encoding(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace("def make_job", "print('✓ mine')\ndef make_job", 1))
    code, said, err = shell(shop, TRAIN, "2>&1", PYTHONIOENCODING="ascii")
    assert code == "0" and "ok mine" in said and "Error" not in said + err, said
    code, said, _ = shell(shop, ("ckpt", "ls", "run"), "2>&1", PYTHONIOENCODING="ascii")
    assert code == "0" and "ok step" in said, said


@pytest.mark.parametrize(
    "verb",
    [
        ("--help",),
        pytest.param(("config", "job.py"), marks=pytest.mark.soak),
        ("train", "job.py", "--trian.steps", "4"),
        ("ckpt",),
        ("train", "--help"),
    ],
)
@pytest.mark.parametrize("rest", ["2>&1 | true", ">&- 2>&-"])
def test_the_exit_code_does_not_depend_on_who_reads(shop: Shop, verb: tuple[str, ...], rest: str) -> None:
    code, _, err = shell(shop, verb, rest)
    assert code == str(shop.run(*verb).code) and err == ""


def shell(shop: Shop, words: tuple[str, ...], rest: str, **environ: str) -> tuple[str, str, str]:
    """The exit code of the command itself (not of the pipe's last part), what came through, and what else was said."""
    script = f"{shlex.join(shop.command(*words))} {rest}; echo ${{PIPESTATUS[0]}} > code"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=shop.path,
        env={**shop.environ(), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return (shop.path / "code").read_text().strip(), done.stdout, done.stderr


def test_a_log_on_a_disk_that_is_full_for_a_while_gets_later_lines(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from paceline.console.output import print_line, take_dropped_note\n"
        "print_line('before')\n"
        "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))\n"
        "print_line('while it is full')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, limits)\n"
        "print_line('after')\n"
        "print_line(take_dropped_note())\n"
    )
    log = tmp_path / "log"
    with log.open("w") as file:
        assert subprocess.run([sys.executable, "-c", code], stdout=file, check=False).returncode == 0
    lines = log.read_text().splitlines()
    assert lines[0] == "before" and lines[-2:] == [
        "after",
        "the console can't be written to, and output is lost: File too large",
    ], lines
