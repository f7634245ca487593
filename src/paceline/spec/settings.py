"""Every setting with its one dotted name, its type and its default."""

from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["auto", "nccl", "gloo", "mpi", "ucc"]
Precision = Literal["fp32", "bf16", "fp16"]
Buffers = Literal["fold", "broadcast", "mean", "sync_bn"]


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, how precisely and how carefully to train."""

    steps: int | None = None
    epochs: float | None = None
    samples: int | None = None
    tokens: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    precision: Precision = "fp32"
    exact: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    buffers: Buffers = "fold"
    compile: bool = False
    threads: int | None = None
    check_every: int = 100
    backend: Backend = "auto"
    timeout_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Data:
    """How data is read."""

    workers: int = 0
    shards: int | None = None
    drop_last: bool = False
    sample_seeds: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Eval:
    """When and in what portions to evaluate."""

    every: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is written about each step."""

    every: int = 10
    statistics: bool = False


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When to save, and what to keep."""

    every: int | None = None
    keep: int = 3
    consolidated: Literal["last", "none"] = "last"


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Where events go beside the console and the run folder's JSON lines."""

    to: tuple[str, ...] = ("console", "jsonl", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings. `job` holds the parameters of `make_job`."""

    seed: int = 0
    run_dir: str | None = None
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    watch: Watch = field(default_factory=Watch)
    job: dict[str, Any] = field(default_factory=dict)
