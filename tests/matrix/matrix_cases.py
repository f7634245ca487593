"""The list: which models, under which layouts, on how many ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.layout import LayoutKind, parse_layout

MODELS = ("text", "digits", "llama", "gpt2", "bert", "t5", "vit", "mixtral", "nano")
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zbv")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the zoo with its arguments, a layout, and the settings. `micro` is the microbatch's size.

    `checks`: `start` (digest of what was built), `float64` and `fp32` (lockstep), `final` (digest after `steps`).
    """

    model: str
    layout: str
    ranks: int
    micro: int | None = None
    steps: int = 2
    checks: tuple[str, ...] = ("start", "float64")
    settings: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """How many there have to be; of a layout that can't be read, one to hear why."""
        try:
            return parse_layout(self.layout).processes(ranks=self.ranks)
        except Exception:
            return 1

    def as_json(self) -> dict[str, Any]:
        """For the pipe and the file."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Case":
        """From there."""
        return Case(**{**value, "checks": tuple(value["checks"])})

    def __str__(self) -> str:
        more = [f"{name}={value}" for name, value in {**self.params, **self.settings}.items()]
        return " ".join([self.model, self.layout, f"×{self.ranks}", *more])


def _schedules(prefix: str, more: str = "") -> list[str]:
    return [f"{prefix},schedule={schedule}{more}" for schedule in SCHEDULES]


SINGLES: dict[int, list[str]] = {
    1: ["single"],
    2: ["threads", "ddp", "zero1", "zero2", "fsdp", "tp", *_schedules("pp"), "cp", "ep"],
    4: ["hsdp"],
}

MIXTURES: dict[int, list[str]] = {
    2: [
        "fsdp,remat=full",
        "tp,remat=full",
        "pp,remat=full",
        "cp,remat=full",
        "ep,remat=full",
        "tp,sequence=true",
        "dp_shard=2,ep=2",
        "dp_shard=2,ep=2,zero=1",
    ],
    4: [
        "pp=2,dp_replicate=2",
        "pp=2,dp_shard=2,zero=1",
        "pp=2,dp_shard=2,zero=2,schedule=zb_h1",
        "pp=2,dp_shard=2",
        "pp=2,dp_shard=2,schedule=interleaved,remat=full",
        "dp_replicate=2,tp=2",
        "dp_shard=2,tp=2",
        "dp_shard=2,tp=2,zero=1",
        "dp_shard=2,tp=2,sequence=true,remat=full",
        "pp=2,tp=2",
        "pp=2,tp=2,schedule=zbv",
        "dp_replicate=2,cp=2",
        "dp_shard=2,cp=2",
        "dp_shard=2,cp=2,zero=1",
        "cp=2,tp=2",
        "pp=2,cp=2",
        "dp_replicate=2,ep=2,tp=2",
        "dp_shard=2,ep=2,tp=2,sequence=true",
        "dp_shard=2,ep=2,cp=2",
        "dp_replicate=2,dp_shard=2,ep=2",
        "dp_shard=4,ep=2,zero=1",
        "pp=2,dp_replicate=2,ep=2",
        "hsdp,zero=1",
        "hsdp,remat=full",
        "pp=4,schedule=gpipe",
    ],
    8: [
        "pp=2,dp_shard=2,tp=2",
        "pp=2,dp_replicate=2,tp=2,schedule=gpipe",
        "pp=2,dp_replicate=2,dp_shard=2",
        "pp=2,dp_replicate=2,dp_shard=2,zero=2,schedule=breadth_first",
        "dp_replicate=2,dp_shard=2,tp=2",
        "dp_replicate=2,dp_shard=2,cp=2",
        "dp_shard=2,cp=2,tp=2",
        "pp=2,dp_shard=2,cp=2",
        "pp=2,cp=2,tp=2",
        "dp_replicate=2,dp_shard=4,ep=2",
        "pp=2,dp_replicate=2,ep=2,tp=2",
        "dp_shard=2,ep=2,cp=2,tp=2",
        "pp=4,dp_shard=2,zero=1",
        "fsdp",
    ],
}


def layouts(sizes: Iterable[int]) -> Iterator[tuple[int, str]]:
    """All of them, with their ranks."""
    for ranks in (1, *sizes):
        for layout in [*SINGLES.get(ranks, []), *MIXTURES.get(ranks, [])]:
            yield ranks, layout


def micro_of(layout: str) -> int | None:
    """A pipeline gets microbatches to fill it."""
    words = layout.split(",")
    if not any(word == "pp" or word.startswith("pp=") for word in words):
        return None
    return 1 if any(word in ("dp_replicate=2", "dp_shard=2") for word in words) else 2


def make(model: str, layout: str, ranks: int, **more: Any) -> Case:
    """One case as the matrix has it."""
    return Case(model=model, layout=layout, ranks=ranks, **{"micro": micro_of(layout), **more})


def whole(sizes: Iterable[int] = (2, 4, 8), **more: Any) -> list[Case]:
    """Models × layouts."""
    found = [make(model, layout, ranks, **more) for ranks, layout in layouts(sizes) for model in MODELS]
    return sorted(found, key=lambda case: case.processes)


def is_single(layout: str) -> bool:
    """A layout of one word, or that with its schedule."""
    word, _, rest = layout.partition(",")
    return word in list(LayoutKind) and (not rest or rest.startswith("schedule="))
