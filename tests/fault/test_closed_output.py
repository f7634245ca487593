"""A terminal that closes, or a reader that has seen enough, ends no run and no answer's exit code."""

import io
import shlex
import subprocess
from pathlib import Path

import pytest

from paceline.talk import say
from paceline.watch.console import Tail
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
    assert (shop.path / "run" / "weights.json").exists()
    assert said.count("\n") <= 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_marks_that_a_terminal_lacks_are_said_with_others(tmp_path: Path, encoding: str) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    say("✓ one × 2, 语", terminal)
    assert terminal.buffer.getvalue() == {"latin-1": "ok one × 2, ?\n", "ascii": "ok one x 2, ?\n"}[encoding].encode(
        encoding
    )
    (tmp_path / "rank-0.log").write_text("✓ said\nby a rank ✗", encoding="utf-8")
    Tail(tmp_path, out=terminal).close()
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
