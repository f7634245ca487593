"""A planted fault in a copy of an example, and how its job file is written."""

from dataclasses import dataclass
from pathlib import Path

import paceline

EXAMPLES = Path(paceline.__file__).parent / "examples"
SMALL = {
    "text": ("--job.width", "32", "--job.depth", "1", "--job.context", "16"),
    "digits_cnn": ("--job.width", "4"),
    "hf_llama": ("--job.width", "16", "--job.depth", "1", "--job.context", "16"),
}

HEAD = '''

# ---- the fault ----
import functools
from dataclasses import replace

import torch.distributed as dist


def my_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def changed_job(change):
    """The example's job, with the fields that `change(job)` gives."""
    global make_job
    plain = make_job

    @functools.wraps(plain)
    def make(*args, **kw):
        job = plain(*args, **kw)
        return replace(job, **change(job))

    make_job = make

'''


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A fault in a copy of an example, and what the user must be told, written before the first run.

    `steps`, `parameters` (beginnings of names; none: every tensor differs, any name will do) and `says` (regular
    expressions, each of which must be found in the cause, or in the error's text where `refused`) are checked.
    """

    name: str
    example: str
    ranks: int
    code: str
    should: str
    says: tuple[str, ...]
    steps: tuple[int, ...] = (1,)
    parameters: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    verdict: str = "different"
    quick: bool = False

    def job(self) -> str:
        """The text of the job file."""
        example = (EXAMPLES / f"{self.example}.py").read_text()
        return example + HEAD + self.code

    def command(self) -> list[str]:
        """The words after `paceline`."""
        start = ["verify", "job.py", "--layout", "ddp", "--ranks", str(self.ranks), "--json"]
        return [*start, *SMALL[self.example], *self.words]
