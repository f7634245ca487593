"""Each bad input ends soon, with one screen in our own words, the right exit code and its own message."""

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL_JOB, Shop, no_process

pytestmark = pytest.mark.one_worker  # they share SEEN
SEEN: dict[str, str] = {}
EARLY: dict[str, tuple[tuple[str, ...], str]] = {
    "an empty job": (("train", ""), "the job is empty"),
    "no such difference": (("train", "job.py", "--allow", "optimiser"), "did you mean 'optimizer'"),
    "an empty run folder": (("train", "job.py", "--run-dir", ""), "--run-dir is empty: is a variable unset?"),
    "an empty run to resume": (("train", "job.py", "--resume="), "--resume is empty: is a variable unset?"),
    "a name that no file has": (("train", "x" * 300 + ".py"), "File name too long"),
    "a run folder that no disk takes": (("train", "job.py", "--run-dir", "x" * 300), "300 bytes, at most 255"),
    "a path that no disk takes": (("train", "job.py", "--run-dir", "x/" * 3000), "has 6,000 bytes, at most 3,800"),
    "another spelling of a choice": (("train", "job.py", "--train.precision", "FP32"), "did you mean 'fp32'"),
    "a seed without an end": (("train", "job.py", "--seed", str(10**30)), "expected a 64-bit integer"),
    "a date in a file": (("train", "job.py", "--config", "date.toml"), 'tag = "1979-05-27", as a string'),
    "a file of brackets": (("train", "job.py", "--config", "deep.toml"), "deep.toml is nested too deeply"),
    "a job of brackets": (("train", "deep.py"), "deep.py is nested too deeply"),
    "a fault on no rank": (("train", "job.py", "--ranks", "2", "--faults", "kill rank=99 step=1"), "ranks are 0 to 1"),
    "a fault before the first step": (("train", "job.py", "--faults", "kill rank=0 step=0"), "count from 1"),
    "a fault in two steps": (("train", "job.py", "--faults", "kill rank=0 step=2 step=3"), "is not understood"),
    "a fault after the last step": (
        ("train", "job.py", "--train.steps", "3", "--faults", "kill rank=0 step=4"),
        "the run has 3",
    ),
    "a model for a job": (("train", "model"), "is a model's folder"),
    "no place to watch": (("train", "job.py", "--watch.to", ":"), "does not name a sink"),
    "no verb of that name": (("trian", "job.py"), "did you mean 'train'"),
    "no such file": (("train", "nowhere.py"), "does not exist"),
    "a folder for a job": (("train", "."), "is a folder"),
    "not Python": (("train", "broken.py"), "not valid Python"),
    "binary for a job": (("train", "binary.py"), "Python"),
    "no job in it": (("train", "empty.py"), "defines no make_job"),
    "no such name in it": (("train", "job.py:other"), "other"),
    "no module reference": (("train", "a..b"), "is not a job"),
    "unknown setting": (("train", "job.py", "--train.stps", "3"), "did you mean 'train.steps'"),
    "wrong type": (("train", "job.py", "--train.steps", "many"), "many"),
    "wrong choice": (("train", "job.py", "--train.precision", "fp8"), "fp8"),
    "wrong policy": (("train", "job.py", "--train.buffers", "avg"), "avg"),
    "an ascent": (
        ("train", "job.py", "--train.max_grad_norm", "-1"),
        "max_grad_norm = '-1': expected a number, above 0",
    ),
    "an evaluation of nothing": (
        ("train", "job.py", "--eval.batch_size", "-1"),
        "batch_size = '-1': expected a number",
    ),
    "no pass at all": (("train", "job.py", "--train.epochs", "0"), "epochs = '0': expected a number, above 0"),
    "passes without an end": (("train", "job.py", "--train.epochs", "inf"), "at most 1,000,000"),
    "an interval of nothing": (
        ("train", "job.py", "--log.every", "0"),
        "log.every = '0': expected a number, 1 or more",
    ),
    "steps below none": (
        ("train", "job.py", "--train.steps", "-5"),
        "train.steps = '-5': expected a number, 0 or more",
    ),
    "a timeout that is no number": (("train", "job.py", "--train.timeout_seconds=nan"), "'nan': expected a number"),
    "more threads than a process has": (("train", "job.py", "--train.threads", "100000"), "1 to 1,024"),
    "out of range in a file": (("verify", "job.py", "--config", "range.toml"), "where: file range.toml"),
    "two out of range": (
        ("train", "job.py", "--data.workers", "-1", "--checkpoint.every", "0"),
        "2. checkpoint.every = '0': expected a number",
    ),
    "unknown section": (("train", "job.py", "--trian.steps", "3"), "trian.steps"),
    "unknown option": (("train", "job.py", "--rank", "3"), "did you mean '--ranks'"),
    "unknown parameter": (("train", "job.py", "--job.lrr", "3"), "did you mean 'lr'"),
    "no such config file": (("train", "job.py", "--config", "none.toml"), "none.toml"),
    "broken config file": (("train", "job.py", "--config", "broken.toml"), "can't be read"),
    "unknown key in a file": (("train", "job.py", "--config", "unknown.toml"), "train.speed"),
    "unknown layout": (("train", "job.py", "--layout", "dpp"), "did you mean"),
    "auto and an option": (("train", "job.py", "--layout", "auto,remat=full"), "auto can't be combined"),
    "auto where layouts are named": (("compare", "job.py", "--layouts", "auto", "ddp"), "auto can't be combined"),
    "auto and an update rule": (
        ("train", "job.py", "--layout", "auto", "--update", "2bw"),
        "the step time of this update rule can't be forecast",
    ),
    "auto and compression": (
        ("train", "job.py", "--layout", "auto", "--compress", "bf16"),
        "compression needs ddp",
    ),
    "threads and another axis": (
        ("train", "job.py", "--layout", "threads=2,dp=2"),
        "combines threads with something else",
    ),
    "a fault on a thread": (
        ("train", "job.py", "--layout", "threads=2", "--faults", "kill rank=1 step=2"),
        "a fault on rank 1",
    ),
    "no thread at all": (("train", "job.py", "--layout", "threads=0"), "threads=0"),
    "an axis without a count": (("train", "job.py", "--layout", "dp=two"), "'two'"),
    "an axis of zero": (("train", "job.py", "--layout", "dp=0"), "'0'"),
    "unknown update": (("train", "job.py", "--update", "async"), "async"),
    "servers and no worker": (("train", "job.py", "--update", "ps,servers=2"), "no worker is left"),
    "no ranks": (("train", "job.py", "--ranks", "0"), "at least one"),
    "ranks in words": (("train", "job.py", "--ranks", "two"), "expected an integer"),
    "unknown device": (("train", "job.py", "--device", "gpu"), "'gpu'"),
    "no GPU here": (("train", "job.py", "--device", "cuda"), "no visible GPU"),
    "a fault not understood": (("train", "job.py", "--faults", "explode rank=1 step=1"), "explode"),
    "unknown sink": (("train", "job.py", "--watch.to", "jsonl,consle"), "did you mean 'console'"),
    "a fault without a step": (("train", "job.py", "--faults", "kill rank=1"), "kill rank=1"),
    "ranks beyond any machine": (("train", "job.py", "--ranks", "100000"), "--ranks 100000, but this machine has"),
    "nothing to resume": (("train", "job.py", "--resume", "newest"), "no run of job"),
    "resume from nowhere": (("train", "job.py", "--resume", "runs/none"), "no run runs/none"),
    "a run folder that can't be written": (("train", "job.py", "--run-dir", "/proc/nothing"), "can't be written"),
    "a file for a run folder": (("train", "job.py", "--run-dir", "job.py/run"), "job.py/run"),
    "unknown example": (("new", "txt"), "did you mean 'text'"),
    "an example that exists": (("new", "digits"), "is not overwritten"),
    "no run to report": (("report", "none"), "there is no run none"),
    "no run at all": (("report",), "no run here yet"),
    "a folder that is no run": (("ckpt", "ls", "plain"), "is not a run folder"),
    "unknown ckpt word": (("ckpt", "verfy"), "did you mean 'verify'"),
    "one run to compare": (("compare", "plain"), "needs two"),
    "a run to compare that is not there": (("compare", "plain", "none"), "no run none to compare"),
    "a split of another name": (("evaluate", "plain", "--split", "dev"), "'dev'"),
    "no steps to verify": (("verify", "job.py", "--steps", "0"), "at least one step"),
    "settings where none are taken": (("report", "--train.steps", "3"), "takes no settings"),
    "stray words": (("train", "job.py", "extra"), "extra"),
}


@pytest.fixture
def full_shop(shop: Shop) -> Shop:
    shop.write("broken.py", "def make_job(:\n    pass\n")
    (shop.path / "binary.py").write_bytes(b"\x80\x81\x00")
    shop.write("empty.py", "x = 1\n")
    shop.write("broken.toml", "train = [\n")
    shop.write("unknown.toml", "[train]\nspeed = 3\n")
    shop.write("range.toml", "[eval]\nevery = 0\n")
    shop.write("date.toml", "[job]\ntag = 1979-05-27\n")
    shop.write("deep.toml", f"a = {'[' * 5000}{']' * 5000}\n")
    shop.write("deep.py", f"def make_job(): return {'+'.join('1' * 50_000)}\n")
    shop.write("digits_cnn.py", "# mine\n")
    (shop.path / "model").mkdir()
    shop.write("model/config.json", "{}")
    (shop.path / "plain").mkdir()
    return shop


@pytest.mark.parametrize("name", EARLY)
def test_refused_before_a_process_starts(
    full_shop: Shop, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli import main

    words, expected = EARLY[name]
    monkeypatch.chdir(full_shop.path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess, "Popen", no_process)
    code = main(list(words))
    text = capsys.readouterr().err
    assert code == 2, text
    _one_screen(name, text, expected)
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


LATE: dict[str, tuple[str, tuple[str, ...], int, str]] = {
    "import fails": ("import nowhere_to_be_found", (), 1, "nowhere_to_be_found"),
    "make_job raises": ("def make_job():\n    raise ValueError('no data today')", (), 1, "no data today"),
    "a job that leaves, as if it was saved": ("import sys\ndef make_job():\n    sys.exit(75)", (), 1, "the job called sys.exit(75) at"),
    "a loss that leaves, as if it was done": (
        "BASE(loss=lambda o, b: __import__('sys').exit(0))", (), 1, "the job called sys.exit(0) at"),
    "make_job gives no job": ("def make_job():\n    return 3", (), 2, "returned a int"),
    "no optimizer": ("BASE(optimizer=lambda named: None)", (), 2, "NoneType"),
    "half an optimizer": (
        "BASE(optimizer=lambda named: torch.optim.SGD([named[0][1]], lr=0.1))", (), 2, "no group holds"),
    "a foreign parameter": (
        "BASE(optimizer=lambda named: torch.optim.SGD([p for _, p in named] + [torch.nn.Parameter(torch.zeros(1))], lr=0.1))",
        (), 2, "not trainable parameters of this model"),
    "the model is no module": ("BASE(model=lambda: 3)", (), 2, "returned a int, expected a torch.nn.Module"),
    "the model raises": ("BASE(model=lambda: 1 / 0)", (), 1, "ZeroDivisionError"),
    "a lazy module": ("BASE(model=lambda: torch.nn.LazyLinear(4))", (), 2, "get their shape only in the first forward: weight, bias"),
    "complex, sparse, not to be saved, and by a closure": (
        "BASE(model=Odd, optimizer=lambda named: torch.optim.LBFGS([p for _, p in named]), "
        "lr_schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)", (), 2, "5. lr_schedule= returned ReduceLROnPlateau"),
    "extra state that only pickle could write": ("BASE(model=Pickled)", (), 2, "_extra_state holds a value of type PosixPath"),
    "a forward that writes to its weights": ("BASE(model=lambda: Renormed(6, 4))", (), 2, "writes to the parameter weight"),
    "an optimizer that wants a closure": (
        "BASE(optimizer=lambda named: torch.optim.LBFGS([p for _, p in named]))", (), 2, "LBFGS, whose step() needs a closure"),
    "a schedule that wants a metric": (
        "BASE(lr_schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)", (), 2, "ReduceLROnPlateau, whose step() needs metrics"),
    "count and loss disagree": ("BASE(count=lambda b: len(b[-1]) + 1)", (), 2, "count= gives 14 for the term 'loss'"),
    "loss of wrong shape": ("BASE(loss=lambda o, b: (o, 1))", (), 2, "has shape"),
    "loss is a number": ("BASE(loss=lambda o, b: (o.sum().item(), 1))", (), 2, "return the tensor itself"),
    "loss is a list": ("BASE(loss=lambda o, b: [1])", (), 2, "returned a list"),
    "loss is detached": ("BASE(loss=lambda o, b: (o.sum().detach(), 1))", (), 2, "does not depend on"),
    "count is text": ("BASE(loss=lambda o, b: (o.sum(), 'x'))", (), 2, "is a str"),
    "two terms without counts": ("BASE(loss=lambda o, b: {'a': (o.sum(), 1), 'b': (o.sum(), 1)})", (), 2, "2 terms"),
    "empty data": ("BASE(train_data=[])", (), 2, "train_data is empty"),
    "data that is a number": ("BASE(train_data=3)", (), 2, "neither indexed nor iterated"),
    "data raises": ("BASE(train_data=Bad())", (), 2, "disk on fire"),
    "ragged samples": (
        "BASE(train_data=[(torch.zeros(6 + i % 2), torch.tensor(0)) for i in range(40)])", (), 1, "collating samples"),
    "labels out of range": (
        "BASE(loss=lambda o, b: (F.cross_entropy(o, b[-1] + 4, reduction='sum'), 1))", (), 1, "out of bounds"),
    "not finite": ("BASE(loss=lambda o, b: (o.sum() * float('inf'), 1))", (), 1, "gradients are not finite"),
    "nothing counted": ("BASE(loss=lambda o, b: (o.sum() * 0, 0))", (), 1, "the count of loss is 0"),
    "wrong input width": ("BASE(train_data=[(torch.zeros(5), torch.tensor(0))] * 40)", (), 1, "shapes"),
    "a batch the model can't take": ("BASE(train_data=[3.0] * 40, collate=lambda rows: 'text')", (), 2, "batch is a str"),
    "micro and global disagree": (
        "BASE()", ("--train.micro_batch_size", "3", "--train.gradient_accumulation_steps", "3"), 2, "accumulation steps ="),
    "single with two ranks": ("BASE()", ("--layout", "single"), 2, "layout single is one process"),
    "other ranks than the layout": ("BASE()", ("--layout", "dp=3"), 2, "needs 3 ranks"),
    "fp16 without counts": ("BASE()", ("--train.precision", "fp16"), 2, "fp16 needs the counts"),
    "sync_bn without BatchNorm": ("BASE()", ("--train.buffers", "sync_bn"), 2, "no BatchNorm"),
    "a best that is no rule": ("BASE(best='loss:up')", (), 2, "best='loss:up'"),
    "a best that no evaluation gives": ("BASE(best='acuracy:max')", (), 2, "did you mean 'accuracy'?"),
    "a rule on a metric that there is not": (
        "BASE(early_stopping=pl.EarlyStopping(metric='acuracy'))", (), 2, "did you mean 'accuracy'?"),
    "evaluations without data": (
        "BASE(eval_data=None, best='accuracy:max', early_stopping=2)", ("--eval.every", "2", "--evaluate-first"), 2,
        "eval.every=2 and --evaluate-first and best='accuracy:max' and early_stopping=2 ask for evaluations"),
    "evaluations every so often without data": ("BASE(eval_data=None)", ("--eval.every", "2"), 2, "eval_data="),
    "a first evaluation without data": ("BASE(eval_data=None)", ("--evaluate-first",), 2, "eval_data="),
    "a best without data": ("BASE(eval_data=None, best='loss:min')", (), 2, "eval_data="),
    "a rule without data": ("BASE(eval_data=None, early_stopping=3)", (), 2, "eval_data="),
    "an average that is no decay": ("BASE(ema=2.0)", (), 2, "ema=2.0"),
    "four values that no job can have": (
        "BASE(ema=0.0, early_stopping=0, loss_over='batches', global_batch_size=0)", (), 2, "4. early_stopping=0"),
    "settings of a job out of range": (
        "BASE(max_grad_norm=-1.0, micro_batch_size=0, settings={'log.every': 0})", (), 2, "3. train.max_grad_norm = -1.0"),
    "a metric without a count": ("BASE(metrics={'m': lambda o, b: 3.0})", (), 2, "the metric 'm'"),
    "parameter of wrong type": ("BASE_FACTORY", ("--job.lr", "fast"), 2, "--job.lr=fast"),
}  # fmt: skip

BASE = """
import dataclasses
_plain = make_job
class Bad:
    def __len__(self): return 40
    def __getitem__(self, i): raise OSError("disk on fire")
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.words = torch.nn.Embedding(3, 2, sparse=True)
        self.register_buffer("fine", torch.zeros(2, dtype=torch.complex128))
class Renormed(torch.nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)

class Pickled(torch.nn.Linear):
    def __init__(self): super().__init__(6, 4)
    def get_extra_state(self): return {"at": [__import__("pathlib").Path(".")]}
    def set_extra_state(self, state): pass
def BASE(**changes):
    global job
    del globals()["make_job"]
    job = dataclasses.replace(_plain(), **changes)
"""


def _sampled(names: Iterable[str]) -> list[Any]:
    """Each starts two processes: every third in `make test`, all in `make soak`."""
    return [
        pytest.param(name, marks=[pytest.mark.soak] if k % 3 and "," not in name else [])
        for k, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", _sampled(LATE))
def test_refused_or_failed_soon_after_the_start(shop: Shop, name: str) -> None:
    body, words, code, expected = LATE[name]
    if body.startswith("BASE("):
        shop.write("job.py", SMALL_JOB + BASE + body + "\njob_is_made = True\njob = job\n")
    elif body != "BASE_FACTORY":
        shop.write("job.py", body if "def make_job" in body else body + "\ndef make_job(): pass\n")
    ended = shop.train("run", *words, "--train.steps", "3", ranks=2, timeout=60)  # a wait for a rank is 600 s
    assert ended.code == code, ended.text
    _one_screen(name, ended.err, expected)


def test_a_deleted_working_directory_is_named(shop: Shop) -> None:
    gone = shop.path / "gone"
    gone.mkdir()
    command = ["sh", "-c", f'cd {gone} && rmdir {gone} && exec "$0" "$@"', *shop.command("train", "job.py")]
    done = subprocess.run(command, env=shop.environ(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    _one_screen("deleted working directory", done.stderr, "the working directory can't be used")
    assert str(gone) in done.stderr


@pytest.mark.soak
def test_another_models_checkpoint_and_another_batch_are_refused_with_the_difference(shop: Shop) -> None:
    assert shop.train("run", steps=4).code == 0
    for words, expected in (
        (("--train.global_batch_size", "10"), "global_batch_size: was 12, is 10"),
        (("--seed", "4"), "seed: was 0, is 4"),
        (("--job.samples", "60"), "data"),
        (("--train.precision", "bf16"), "precision"),
        (("--job.lr", "0.02"), "optimizer: lr was 0.01, is 0.02"),
    ):
        ended = shop.train("run", *words, steps=8)
        assert ended.code == 2 and "--allow" in ended.err
        _one_screen(f"resume {words}", ended.err, expected)
    shop.write("job.py", SMALL_JOB.replace("16", "20"))
    ended = shop.train("run", steps=8)
    assert ended.code == 2
    _one_screen("another model", ended.err, "belongs to a different model")


def test_a_foreign_checkpoint_folder_is_refused(shop: Shop) -> None:
    folder = shop.path / "run" / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"not ours")
    ended = shop.train("run", steps=8)
    assert ended.code == 2
    _one_screen("foreign checkpoint", ended.err, "checkpoints can be used")


def _one_screen(name: str, text: str, expected: str) -> None:
    assert expected in text, text
    assert "Traceback" not in text and len(text.splitlines()) <= 25
    assert any(word in text for word in ("to do:", "likely cause:", "Full text:"))  # the last of the job's own error
    problems = [line for line in text.splitlines() if re.search(r"(^|\s)2\. ", line)]
    assert len(problems) <= 1, f"said twice: {text}"
    first = text.strip().splitlines()[0].replace(str(Path.cwd()), "")
    assert SEEN.setdefault(first, name) == name, f"{name} and {SEEN[first]} say the same: {first}"
