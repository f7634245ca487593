"""A terminal that closes, or a reader that has seen enough, ends no run and no answer's exit code."""

import shlex
import subprocess

import pytest

from tests.conftest import Shop

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


def shell(shop: Shop, words: tuple[str, ...], rest: str) -> tuple[str, str, str]:
    """The exit code of the command itself (not of the pipe's last part), what came through, and what else was said."""
    script = f"{shlex.join(shop.command(*words))} {rest}; echo ${{PIPESTATUS[0]}} > code"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=shop.path,
        env=shop.environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return (shop.path / "code").read_text().strip(), done.stdout, done.stderr
