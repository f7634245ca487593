"""A fault planted in a layout, and how its job file is written."""

from dataclasses import dataclass
from pathlib import Path

from tests.verification.diagnosis.fault_in_example import HEAD

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Misplaced:
    """A fault of a placing, and what the user must be told, written before the first run.

    `example` is `net` or `zoo:NAME`; `setup` are lines for the globals of `net`. `steps`, `parameters` (beginnings of
    names) and `says` (regular expressions) are checked as those of `Planted` are.
    """

    name: str
    layout: str
    code: str
    should: str
    says: tuple[str, ...]
    example: str = "net"
    ranks: int = 2
    setup: str = ""
    steps: tuple[int, ...] = (1,)
    parameters: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    verdict: str = "different"
    quick: bool = False

    def job(self) -> str:
        """The text of the job file."""
        if self.example == "net":
            start = (HERE / "fault_language_model.py").read_text()
        else:
            name = self.example.partition(":")[2]
            start = (HERE.parents[1] / "zoo.py").read_text() + f"\n\ndef make_job():\n    return {name}(depth=2)\n"
        return f"{start}\n{self.setup}\n{HEAD}{self.code}"

    def command(self) -> list[str]:
        """The words after `paceline`."""
        start = ["verify", "job.py", "--layout", self.layout, "--ranks", str(self.ranks), "--json"]
        return [*start, *self.words]
