"""A rank that is alive but silent is named on one screen with the line of the job that it executes."""

import sys

import pytest

from tests.conftest import SMALL_JOB, Shop

LIMIT = ("--train.timeout_seconds", "3")
LOSS = '    time.sleep(float(os.environ.get("PAUSE", 0)))\n'


def with_loss(line: str) -> str:
    """The small job with this line at the start of its loss; `line` ends in a mark that its number is found by."""
    assert LOSS in SMALL_JOB
    return SMALL_JOB.replace(LOSS, f"    {line}  # here\n")


def line_of(job: str) -> str:
    return f"job.py:{1 + job[: job.index('# here')].count(chr(10))}"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param(with_loss("while True: time.sleep(0.01)"), ("no rank has responded", "rank 1: "), id="all"),
        pytest.param(
            with_loss("while os.environ['RANK'] == '1': time.sleep(0.01)"),
            ("no answer from rank 1",),
            id="one of two",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "import os, time\nwhile os.environ['RANK'] == '1': time.sleep(0.01)  # here\n" + SMALL_JOB,
            ("rank 1",),
            id="at import",
        ),
    ],
)
def test_who_says_nothing_is_named_with_its_line(shop: Shop, job: str, expected: tuple[str, ...]) -> None:
    shop.write("job.py", job)
    ended = shop.train("run", *LIMIT, steps=3, timeout=90)
    assert ended.code in (1, 3), ended.text
    first = ended.err[ended.err.index("FAILED") :]
    for words in (*expected, line_of(job)):
        assert words in first, ended.text
    assert "Traceback" not in ended.text


def test_a_data_worker_that_hangs_is_named(shop: Shop) -> None:
    data = "train_data=torch.utils.data.TensorDataset(x, y)"
    slow = """
class Stuck(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        while index == 30: time.sleep(0.01)  # here
        return super().__getitem__(index)
"""
    job = SMALL_JOB.replace(data, "train_data=Stuck(x, y)") + slow
    shop.write("job.py", job)
    ended = shop.train("run", *LIMIT, "--data.workers", "1", steps=5, timeout=90)
    assert ended.code == 1, ended.text
    assert "it waits for its data worker" in ended.err and line_of(job) in ended.err, ended.text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("print('50%|###', end=''); raise ValueError('no loss today')", "ValueError: no loss today"),
        pytest.param("breakpoint()", "waits for terminal input, but a rank has no terminal", marks=pytest.mark.soak),
        ("input('how much? ')", "input() waits for terminal input"),
    ],
)
def test_the_console_has_one_screen_of_it(shop: Shop, line: str, says: str) -> None:
    job = with_loss(line)
    shop.write("job.py", job)
    ended = shop.train("run", steps=3)
    assert ended.code == 1 and says in ended.err, ended.text
    assert "Traceback" not in ended.text and "\x1e" not in ended.text
    assert "breakpoint" in line or line_of(job) in ended.err  # a debugger stops at the line below


@pytest.mark.cold
def test_a_job_with_the_name_of_a_module_is_that_job(shop: Shop) -> None:
    shop.write("random.py", SMALL_JOB)
    command = [sys.executable, "-P", "-W", "ignore", "-m", "paceline"]  # as the console script, without this folder
    ended = shop.call([*command, "train", "random.py", "--ranks", "2", "--train.steps", "3", "--run-dir", "run"])
    assert ended.code == 0 and "done at step 3" in ended.out, ended.text
