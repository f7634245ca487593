"""A script with a `pl.Run`: how the script ends, its exit code and its messages."""

import shlex
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

import paceline as pl
from paceline.errors import JobError, UsageError
from paceline.trainer.script_restart import restart_arguments
from tests.conftest import SMALL_JOB, Ended, Shop
from tests.trainer.test_edge_cases_of_a_run import job, trained

SCRIPT = """
import os, signal, sys
import paceline as pl
from job import make_job
if __name__ == "__main__":
    ranks, how = int(sys.argv[1]) or None, sys.argv[2]
    settings = {"train.steps": 9, "eval.every": 4, "watch.to": ["console", "jsonl"]}
    with pl.Run(make_job(), ranks=ranks, run_dir="run", settings=settings) as run:
        for batch in run.batches():
            if run._active_session.loop.cursor.step == 3 and how == "stop":
                run.stop()
            step = run.step(batch).step
            if step == 3 and how.startswith("signal") and run.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            if step == 3 and how.endswith("break"):
                break
    print("below", run.rank, run.exit_code, signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def python(shop: Shop, *words: str) -> Ended:
    return shop.call([sys.executable, "-W", "ignore", *words])


def stands(shop: Shop) -> int:
    return max(int(path.name[5:]) for path in (shop.path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, "break"),
        *(pytest.param(n, how, marks=pytest.mark.soak) for n, how in ((2, "break"), (1, "stop"), (2, "stop"))),
    ],
)
def test_who_leaves_the_loop_goes_on_below_it(shop: Shop, ranks: int, how: str) -> None:
    """`stop` comes where an evaluation is due: that it is left for later does not make it a signal."""
    shop.write("own.py", SCRIPT)
    step = 3 if how == "break" else 4
    ended = python(shop, "own.py", str(ranks), how)
    assert f"below 0 75 {ranks == 1}" in ended.out, ended.text
    assert ended.code == 0, ended.text
    assert f"The run is at step {step} of 9 and saved." in ended.text and stands(shop) == step
    (line,) = [line for line in ended.text.splitlines() if "Resume: " in line]
    assert f"own.py {ranks} {how}" in line
    words = shlex.split(line.partition("Resume: ")[2])
    words[-1] = "on"
    again = python(shop, *words[1:])
    assert again.code == 0 and "below 0 0" in again.out and stands(shop) == 9, again.text


@pytest.mark.soak
def test_so_does_every_rank_under_torchrun(shop: Shop) -> None:
    shop.write("own.py", SCRIPT)
    ended = python(shop, *TORCHRUN, "own.py", "0", "break")
    assert ended.code == 0 and "ChildFailedError" not in ended.err, ended.text
    assert "below 0 75 True" in ended.out and "below 1 75 True" in ended.out
    assert (
        ended.err.count("The run is at step 3 of 9 and saved. Resume: torchrun --standalone --nproc-per-node 2 own.py")
        == 1
    )


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, "signal"),
        (1, "signal and break"),
        (2, "signal"),
        pytest.param(2, "signal and break", marks=pytest.mark.soak),
    ],
)
def test_a_signal_ends_the_script_there(shop: Shop, ranks: int, how: str) -> None:
    shop.write("own.py", SCRIPT)
    ended = python(shop, "own.py", str(ranks), how)
    assert ended.code == 75 and "below" not in ended.out, ended.text
    last = ended.err.splitlines()[-1]
    assert last.startswith("Stopped and saved. Resume: ") and "own.py" in last and "The run is at" not in ended.text


def test_without_a_folder_of_its_own_the_line_says_what_to_write(shop: Shop) -> None:
    shop.write("own.py", SCRIPT.replace('run_dir="run", ', ""))
    ended = python(shop, "own.py", "1", "break")
    (folder,) = (shop.path / "runs" / "own").iterdir()
    place = Path("runs") / "own" / folder.name
    assert ended.err.splitlines()[-1].endswith(f"own.py 1 break, with pl.Run(..., run_dir='{place}')"), ended.err


@pytest.mark.parametrize("settings", [{"train.stps": 3}, {"log.every": "often"}, {"watch.to": "consol"}])
def test_a_wrong_setting_is_refused_before_anything_starts(tmp_path: Path, settings: dict[str, str]) -> None:
    with pytest.raises(UsageError) as refused:
        pl.Run(job(), ranks=2, run_dir=tmp_path / "run", settings=settings)
    assert refused.value.hint and refused.value.__cause__ is None
    assert not (tmp_path / "run").exists()


def test_the_folder_may_be_a_setting_and_the_argument_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"run_dir": tmp_path / "set", "train.steps": 1, "watch.to": "jsonl"}
    for given, wanted in ((None, "set"), ("argument", "argument")):
        with pl.Run(job(), ranks=1, run_dir=given, settings=settings) as run:
            for batch in run.batches():
                run.step(batch)
            assert run.folder.resolve() == tmp_path / wanted
        assert ("run_dir" in (run.folder / "config.toml").read_text()) == (given is None)
    assert {path.name for path in tmp_path.iterdir()} == {"set", "argument"}


def test_a_job_that_names_a_folder_is_refused_with_what_to_type(shop: Shop) -> None:
    with pytest.raises(JobError, match="can't set its run folder") as refused:
        pl.Run(job(settings={"run_dir": "runs/rec"}), ranks=1)
    assert "--run-dir runs/rec" in refused.value.hint
    named = SMALL_JOB.replace("max_grad_norm=1.0,", "max_grad_norm=1.0, settings={'run_dir': 'runs/rec'},")
    shop.write("job.py", named)
    for words in (("config", "job.py"), ("train", "job.py", "--train.steps", "1")):
        ended = shop.run(*words)
        assert ended.code == 2 and "--run-dir runs/rec" in ended.err, ended.text


@pytest.mark.parametrize("words", [["-"], ["-c"]])
def test_a_script_that_is_no_file_is_not_started_again(shop: Shop, words: list[str]) -> None:
    code = "import paceline as pl\nfrom job import make_job\nwith pl.Run(make_job(), ranks=2) as run: pass\n"
    command = [sys.executable, "-W", "ignore", *words, *([code] if words == ["-c"] else [])]
    done = subprocess.run(
        command, input=code, cwd=shop.path, env=shop.environ(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "this script is not a file" in done.stderr, done.stderr
    assert "ranks=1 works without a file" in done.stderr and "python mine.py" in done.stderr
    assert not (shop.path / "runs").exists()


def test_a_module_of_a_package_is_started_again_as_that(shop: Shop) -> None:
    (shop.path / "pack").mkdir()
    shop.write("pack/__init__.py", "")
    shop.write("pack/job.py", SMALL_JOB)
    shop.write("pack/own.py", SCRIPT.replace("from job", "from .job"))
    ended = python(shop, "-m", "pack.own", "2", "on")
    assert ended.code == 0 and "below 0 0" in ended.out, ended.text


@pytest.mark.soak
def test_a_second_run_in_started_processes_is_refused_and_the_first_is_whole(shop: Shop) -> None:
    body = SCRIPT.replace('run_dir="run"', "run_dir=folder").replace(
        "    with", "    for folder in ('run', 'two'):\n     with"
    )
    shop.write("own.py", body)
    ended = python(shop, "own.py", "2", "whole")
    assert ended.code == 2 and "a second pl.Run in processes that were started for the first" in ended.err, ended.text
    assert stands(shop) == 9 and not (shop.path / "two").exists()
    assert python(shop, "own.py", "1", "whole").code == 0 and (shop.path / "two" / "weights.json").exists()


def test_a_script_that_goes_back_to_a_checkpoint_is_told_not_to_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(job(), tmp_path, train_steps=4, checkpoint_every=2)
    settings = {"train.steps": 6, "watch.to": "jsonl"}
    older = tmp_path / "checkpoints" / "step-00000002"
    for resume, change in ((older, f", with pl.Run(..., run_dir='{tmp_path}', resume=False)"), (False, "")):
        with pl.Run(job(), ranks=1, run_dir=tmp_path, resume=resume, settings=settings) as run:
            run.step(next(run.batches()))
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("The run is at step ") and (last.endswith(change) if change else "with pl" not in last)
    assert run._active_session.loop.cursor.step == 4


@pytest.mark.parametrize("begins", ["file", "module"])
def test_a_script_that_has_gone_elsewhere_is_started_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    (tmp_path / "out").mkdir()
    script = tmp_path / "mine.py"
    script.write_text("")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    main.__spec__ = ModuleSpec("pack.mine", None) if begins == "module" else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["mine.py", "--lr", "1"])
    monkeypatch.chdir(tmp_path / "out")  # as Hydra does, where mine.py is no file any more
    words = ["-m", "pack.mine"] if begins == "module" else [str(script.resolve())]
    assert restart_arguments(ranks=2) == [*words, "--lr", "1"]
