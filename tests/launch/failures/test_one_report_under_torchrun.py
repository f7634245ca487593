"""Under torchrun one rank reports a failure and the others print one line each."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB, Ended, Shop

TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = ["-m", "paceline", "train", "job.py", "--run-dir", "run", "--train.steps", "4"]
LOSS = '    time.sleep(float(os.environ.get("PAUSE", 0)))\n'
OWN = """
import os
import sys
from torch.distributed.elastic.multiprocessing.errors import record
import paceline as pl
from job import make_job
{head}
@record
def main():
    with pl.Run(make_job(), layout="ddp", ranks=2, run_dir="run", settings={{"train.steps": 4}}) as run:
        for batch in run.batches():
            result = run.step(batch)
            {within}
    {after}
main()
"""
PLACED = """
import torch
import paceline as pl
placed = pl.place(lambda: torch.nn.Linear(3, 1), layout="ddp")
optimizer = placed.optimizer(lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
for step in range(4):
    loss = placed.model(torch.ones(2, 3)).sum()
    if step == 2 and placed.world.rank == 1:
        raise ValueError("not today")
    placed.backward(loss)
    optimizer.step()
"""


def torchrun(shop: Shop, *words: str) -> Ended:
    return shop.call([*TORCHRUN, *words], environ={"OMP_NUM_THREADS": "1"})


def said(ended: Ended) -> list[str]:
    """What the ranks said on the standard error: all before torchrun's own words."""
    return re.split(r"^(?:[WE]\d{4} |Sending process|failed \(exitcode)", ended.err, flags=re.M)[0].splitlines()


def cause(ended: Ended) -> str:
    """What torchrun calls the root cause."""
    return ended.err.partition("Root Cause")[2].partition("traceback :")[2].strip()


def test_a_script_under_torchrun_tells_of_a_failure_once(shop: Shop) -> None:
    hook = "old = sys.excepthook\nsys.excepthook = lambda *e: (open(f'heard-{os.environ[\"RANK\"]}', 'w').close(), old(*e))"
    fails = "if run.rank == 1 and result.step == 2: raise ValueError('not today')"
    shop.write("own.py", OWN.format(head=hook, within=fails, after="pass"))
    ended = torchrun(shop, "own.py")
    lines = said(ended)
    assert ended.code == 1 and lines.count("[rank1]: ValueError: not today") == 1, ended.text
    late = f"[rank0]: rank 0 stopped at step 3 because rank 1 failed: ValueError: not today ({shop.path / 'own.py'}:14)"
    assert [line for line in lines if "rank0" in line] in ([late], []), ended.text  # torchrun may end it before
    assert re.fullmatch(r"FAILED\. rank 1, \S+own\.py:\d+, ValueError: not today\n=+", cause(ended)), ended.text
    assert (shop.path / "heard-1").exists()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("within", "after", "expected"),
    [
        ("run.evaluate(split='nope')", "pass", ["error: run.evaluate(split='nope'): 'nope' is not a split."]),
        ("if result.step == 2: sys.exit(3)", "pass", ["rank R left the run: the script called sys.exit(3) at"]),
    ],
)
def test_what_all_ranks_meet_is_told_by_one(shop: Shop, within: str, after: str, expected: list[str]) -> None:
    shop.write("own.py", OWN.format(head="", within=within, after=after))
    ended = torchrun(shop, "own.py")
    found = [
        re.sub(r"^\[rank\d\]: |(?<=rank )\d", lambda m: "R" if m[0].isdigit() else "", line) for line in said(ended)
    ]
    for words in expected:
        assert sum(line.startswith(words) for line in found) == 1, ended.text
    assert not [line for line in found if "paceline/" in line]


@pytest.mark.soak
def test_what_a_script_catches_itself_is_not_told(shop: Shop) -> None:
    text = OWN.format(head="", within="raise ValueError('mine')", after="pass")
    shop.write("own.py", text.replace("\nmain()\n", "\ntry:\n    main()\nexcept ValueError:\n    print('caught')\n"))
    ended = torchrun(shop, "own.py")
    assert ended.code == 0 and ended.out.count("caught") == 2 and said(ended) == [], ended.text


@pytest.mark.soak
def test_a_function_under_torchrun_tells_of_a_failure_in_the_users_lines(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace(LOSS, "    raise ValueError('not today')\n"))
    shop.write("own.py", "import paceline as pl\nfrom job import make_job\npl.train(make_job(), run_dir='run')\n")
    ended = torchrun(shop, "own.py")
    lines = said(ended)
    assert sum(line.endswith(": ValueError: not today") for line in lines) == 1, ended.text
    assert sum('job.py", line' in line and line.endswith(", in loss") for line in lines) == 1, ended.text
    assert not [line for line in lines if "paceline/" in line]
    assert re.fullmatch(r"FAILED at step 1\. rank \d, \S+job\.py:\d+, ValueError: not today\n=+", cause(ended)), (
        ended.text
    )


@pytest.mark.soak
def test_a_placed_model_under_torchrun_tells_of_a_failure_once(shop: Shop) -> None:
    shop.write("placed.py", PLACED)
    ended = torchrun(shop, "placed.py")
    lines = said(ended)
    assert "[rank1]: ValueError: not today" in lines and not [line for line in lines if "paceline/" in line], ended.text
    assert sum("because another rank failed" in line for line in lines) <= 1
    assert "ValueError: not today" in cause(ended)


def test_a_script_of_one_process_says_it_in_the_users_lines(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace(LOSS, "    raise ValueError('not today')\n"))
    shop.write("own.py", OWN.format(head="", within="pass", after="pass").replace("ranks=2", "ranks=1"))
    ended = shop.call([sys.executable, "-W", "ignore", "own.py"])
    frames = re.findall(r'File "(.*?)", line \d+, in (\S+)', ended.err)
    assert ended.code == 1 and ended.err.splitlines()[-2:] == ["ValueError: not today", "at step 1"], ended.text
    assert [(Path(file).name, name) for file, name in frames if "site-packages" not in file] == [
        ("own.py", "<module>"),
        ("own.py", "main"),
        ("job.py", "loss"),
    ]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("job", "words", "code", "key", "value"),
    [
        (SMALL_JOB, ("nojob.py",), 2, "what", "nojob.py does not exist."),
        (SMALL_JOB, ("job.py", "--train.backend", "mpi"), 2, "error", "UsageError"),
        (SMALL_JOB.replace(LOSS, "    raise ValueError('not today')\n"), ("job.py",), 1, "what", "not today"),
        (SMALL_JOB.replace(LOSS, "    os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\n"), ("job.py",), 1,
         "error", "PeerError"),
        (SMALL_JOB, ("job.py",), 0, "step", 4),
    ],
)  # fmt: skip
def test_json_under_torchrun_is_one_answer(
    shop: Shop, job: str, words: tuple[str, ...], code: int, key: str, value: object
) -> None:
    shop.write("job.py", job)
    launch = [*COMMAND[:3], *words, *COMMAND[4:], "--json"]
    ended = torchrun(shop, *launch)
    found = json.loads(ended.out)
    assert found[key] == value and found.get("exit_code", code) == code, ended.text
    assert "seconds" not in found or found["seconds"] > 0, ended.text
    assert len(said(ended)) < 20 and "paceline/" not in "\n".join(said(ended))


def test_a_backend_that_torch_lacks_is_refused_before_a_process_starts(shop: Shop) -> None:
    ended = shop.train("run", "--train.backend", "mpi")
    assert ended.code == 2 and ended.err.startswith("error: this build of torch has no backend mpi; it has "), (
        ended.text
    )
    assert not (shop.path / "run").exists() and "starting" not in ended.out


@pytest.mark.parametrize(
    ("words", "saved"), [(("--checkpoint.every", "100"), False), (("--checkpoint.every", "2"), True)]
)
def test_going_on_is_offered_where_it_can_help(shop: Shop, words: tuple[str, ...], saved: bool) -> None:
    dies = "    global calls\n    calls += 1\n    assert calls < 4, 'not today'\n"
    shop.write("job.py", SMALL_JOB.replace(LOSS, dies) + "\ncalls = 0\n")
    ended = shop.train("run", *words, "--data.workers", "0", ranks=1, steps=8)
    assert ended.code == 1 and "AssertionError: not today" in ended.err, ended.text
    assert ("Resume: " in ended.err) is saved
