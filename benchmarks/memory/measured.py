"""One setting in a run of its own: a job, a layout, ranks, a batch; a row for each rank.

A row says what was asked (`name`, `family`, `layout`, `ranks`, `global_batch`, `micro_batch`, `precision`, `threads`,
`update`: which optimizer, `job`: its parameters), whose it is (`rank`), and in bytes:

- `parameters`, `gradients`, `optimizer`, `buffers`: elements that lie on this rank between two steps, exact;
- `live_before`, `peak_live`, `live_after`: the allocator's sum before, at most during and after two steps; `peaks` of
  each. `phase` and `inside` say what ran at the peak; `unseen` how many bytes moved in other threads;
- `rss_base`, `rss_before`, `rss_peak`: resident with the job's libraries but no model, between two steps, at most.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.commands.common.execution import CommandOutcome, RunOptions, execute, make_task, read_result

ENTRY = "benchmarks.memory.worker:measure"
_ROOT = Path(__file__).resolve().parents[2]
_NEVER = 1000
_OWN = (
    f"--train.steps={_NEVER}", f"--eval.every={_NEVER}", f"--checkpoint.every={_NEVER}", f"--log.every={_NEVER}",
    "--watch.to=jsonl",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What to run. `job` are the parameters of the family's job; `optimizer` is one of them."""

    family: str
    layout: str = "single"
    ranks: int = 1
    batch: int = 8
    micro: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    threads: int = 1
    job: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        cut = "" if self.micro is None else f"/{self.micro}"
        sizes = [f"{name}={value}" for name, value in self.job.items()]
        words = [self.family, self.layout, f"x{self.ranks}", f"b{self.batch}{cut}", self.precision, self.optimizer]
        return " ".join([*words, *sizes])

    @property
    def overrides(self) -> list[str]:
        """As typed after the command."""
        asked: dict[str, Any] = {f"job.{name}": value for name, value in self.job.items()}
        asked |= {"job.optimizer": self.optimizer, "train.global_batch_size": self.batch}
        asked |= {"train.precision": self.precision, "train.threads": self.threads}
        if self.micro is not None:
            asked["train.micro_batch_size"] = self.micro
        return [f"--{name}={value}" for name, value in asked.items()]


@dataclass(kw_only=True)
class Failed(Exception):
    """The run ended before its third step."""

    setting: Setting
    screen: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.screen}"


def measure(setting: Setting) -> list[dict[str, Any]]:
    """A row for each rank.

    Raises:
        PacelineError: it is refused before a process starts.
        Failed: a rank ended otherwise than it should.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = RunOptions(ranks=setting.ranks, layout=setting.layout, device="cpu", run_dir=folder, quiet=True)
        task = make_task("compare", f"benchmarks.memory.jobs:{setting.family}", common, [*_OWN, *setting.overrides])
        with _workers_shown_the_way():
            answer = execute(task, entry=ENTRY, common=common)
        found = read_result(task, "compare")
    if found is None:
        raise Failed(setting=setting, screen=_words(answer))
    return [_row(setting, rank, micro=found["micro_batch_size"]) for rank in found["ranks"]]


def _row(setting: Setting, rank: Mapping[str, Any], *, micro: int) -> dict[str, Any]:
    asked = {
        "name": str(setting),
        "family": setting.family,
        "layout": setting.layout,
        "ranks": setting.ranks,
        "global_batch": setting.batch,
        "micro_batch": micro,
        "precision": setting.precision,
        "update": setting.optimizer,
        "job": dict(setting.job),
    }
    return {**asked, **rank}


def _words(answer: CommandOutcome) -> str:
    return answer.screen or f"exit code {answer.exit_code}"


@contextmanager
def _workers_shown_the_way() -> Iterator[None]:
    """They import this package too, from the checkout."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, (before or "").split(os.pathsep))])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        os.environ.update({} if before is None else {"PYTHONPATH": before})
