"""Define all settings: the dotted name, type, range and default of each."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

Backend = Literal["auto", "nccl", "gloo", "mpi", "ucc"]
Precision = Literal["fp32", "bf16", "fp16"]
Buffers = Literal["fold", "broadcast", "mean", "sync_bn"]

MAX_COUNT = 10**18
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Norm = Annotated[float, Meta(gt=0)]
Epochs = Annotated[float, Meta(gt=0, le=1_000_000)]
MAX_SECONDS = 31_536_000  # a year
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Threads = Annotated[int, Meta(ge=1, le=1024)]
Blocks = Annotated[int, Meta(ge=1, le=1_000_000)]
Shards = Annotated[int, Meta(ge=1, le=1024)]
SequenceShards = Annotated[int, Meta(ge=2, le=1024)]
Workers = Annotated[int, Meta(ge=0, le=1024)]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Settings for the length, precision and safety of training.

    `check_every` is the number of steps between two comparisons of the replicas' weights; 0 means no comparison.
    `tensor_shards` is the number of logical shards of each weight that tp splits, in exact mode.
    `sequence_shards` is the number of parts in which exact mode computes each sequence, on any number of cp ranks.
    """

    steps: CountOrZero | None = None
    epochs: Epochs | None = None
    samples: Count | None = None
    tokens: Count | None = None
    global_batch_size: Count | None = None
    micro_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    max_grad_norm: Norm | None = None
    precision: Precision = "fp32"
    exact: bool = False
    tensor_shards: Shards | None = None
    sequence_shards: SequenceShards | None = None
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    spike_sigma: Norm = 10.0
    max_rollbacks: CountOrZero = 3
    on_empty: Literal["stop", "zero"] = "stop"
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    buffers: Buffers = "fold"
    compile: bool = False
    threads: Threads | None = None
    check_every: CountOrZero = 100
    backend: Backend = "auto"
    timeout_seconds: Seconds = 600.0


@dataclass(frozen=True, kw_only=True)
class Data:
    """Settings for reading data."""

    workers: Workers = 0
    shards: Count | None = None
    drop_last: bool = False
    sample_seeds: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Settings for when to evaluate, and in what batches."""

    every: Count | None = None
    batch_size: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Log:
    """Settings for what is written about each step."""

    every: Count = 10
    statistics: bool = False


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Settings for when to save, and what to keep.

    `background` writes checkpoints to disk while the training continues. `memory_every` is the number of steps between
    two checkpoints in memory; 0 means none. `peer_copies` is the number of other nodes that get a copy of those.
    `remote` is the URL of a store that gets a copy of the checkpoints; `none` means no store. `remote_timeout` is how
    long a run waits at its end for a store that can't be written.
    """

    every: Count | None = None
    background: bool = False
    memory_every: CountOrZero | None = None
    peer_copies: CountOrZero = 1
    keep: Count = 3
    remote: str | None = None
    remote_keep: Count = 3
    remote_timeout: Seconds = 60.0
    consolidated: Literal["last", "none"] = "last"


@dataclass(frozen=True, kw_only=True)
class Survive:
    """Settings for what happens after a fault.

    `restarts` is how many times in a row a run restarts itself without a new checkpoint in between. With 0, it never
    restarts itself. `min_ranks` is the number of ranks with which a run may continue if a rank is lost. A rank is lost
    if its replacements fail for `replace_within` seconds. `grace` is the time in seconds that a scheduler leaves
    between a stop signal and the kill.
    """

    restarts: CountOrZero = 3
    min_ranks: Count | None = None
    replace_within: SecondsOrZero = 10.0
    grace: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Settings for a run that Paceline itself starts on several nodes.

    `wait` is the time in seconds in which the nodes meet. If the number of nodes may change, the smallest number waits
    for more of them for `last_call` seconds. A node from which nothing has come for `patience` seconds is lost.
    `restarts` is how many times the run continues after the loss of a node; None means 0, or 20 if the number of nodes
    may change. `interface` is the network interface of the ranks.
    """

    wait: Seconds = 300.0
    last_call: SecondsOrZero = 30.0
    patience: Seconds = 30.0
    restarts: CountOrZero | None = None
    interface: str | None = None


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Settings for event sinks, such as the console and the run folder's JSON lines."""

    to: tuple[str, ...] = ("console", "jsonl", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class Init:
    """Settings for initial values. `limit`: bytes of weights and buffers above which no rank builds the whole model."""

    limit: Count = 1 << 35


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Settings for the placement of the model, in addition to the layout.

    `units` are class names, patterns of fully qualified names (FQNs, such as `layers.*`), or the least number of
    elements of a unit. `blocks` are the FQNs of the blocks in the order of the forward. `stages` has the number of
    blocks of each stage. `cut` is the method by which the model is cut into stages. `replicate` are FQN patterns of
    modules that tp does not split.
    """

    units: tuple[str, ...] = ()
    reshard: bool | None = None
    prefetch: CountOrZero = 0
    blocks: tuple[str, ...] = ()
    stages: tuple[Blocks, ...] = ()
    balance: Literal["even", "measured"] = "even"
    cut: Literal["auto", "chain", "export"] = "auto"
    tensor_plan: str | None = None
    replicate: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The complete settings. `job` holds the parameters of `make_job`."""

    seed: int = 0
    run_dir: str | None = None
    train: Train = field(default_factory=Train)
    place: PlacementSettings = field(default_factory=PlacementSettings)
    init: Init = field(default_factory=Init)
    data: Data = field(default_factory=Data)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    survive: Survive = field(default_factory=Survive)
    nodes: Nodes = field(default_factory=Nodes)
    watch: Watch = field(default_factory=Watch)
    job: dict[str, Any] = field(default_factory=dict)
