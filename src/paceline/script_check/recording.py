"""A recording of a training script: a file for each rank, with a line for each step of an optimizer."""

import json
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError

FOLDER_VARIABLE = "PACELINE_SCRIPT_RECORDING"
STEPS_VARIABLE = "PACELINE_SCRIPT_STEPS"
EVERY_VARIABLE = "PACELINE_SCRIPT_EVERY"
CHECKER_VARIABLE = "PACELINE_SCRIPT_CHECKER"
"""The process of `check`; without it, a recorded process ends at its next step."""
SEED_VARIABLE = "PACELINE_SCRIPT_SEED"
"""If set, random numbers are seeded with it before the first line of the script."""
KEEP_VARIABLE = "PACELINE_SCRIPT_KEEP_BATCHES"
"""If set, the batches of the models and of the data loaders are written."""
FEED_VARIABLE = "PACELINE_SCRIPT_FEED"
"""The folder of a recording whose batches the script gets in place of its own."""
BATCH_FOLDER = "batches"
START_FOLDER = "start"
_ORIGIN_FILE = "script.json"


UNKNOWN_PARAMETER = "parameter "
"""The names of parameters that are in no living module begin so."""
FIRST_STEPS = 2
"""The first steps have all summaries in any case; two of them tell a gradient that was not set to zero."""


class TensorPrint(msgspec.Struct, frozen=True, array_like=True):
    """A summary of a tensor, or of the part of it that a rank has.

    The squares of the norms, the projections and the digests of all parts add up to those of the whole tensor. `part`
    has the start and the length in each dimension, or is None if the rank has the whole tensor. `faint_share` is the
    share of elements that may be only rounding; it also adds up.
    """

    numel: int
    norm: float
    largest: float
    projections: tuple[float, ...]
    digest: int
    part: tuple[tuple[int, int], ...] | None = None
    faint_share: float = 0.0


class PiecePrint(msgspec.Struct, frozen=True, array_like=True):
    """The values that this process has of a parameter which a rank of another recording holds whole or in part.

    `own_name` is this process's parameter, and `num_padding` the number of elements that it lacks. `gradient` and
    `weight` are those of its elements, in the order of the rank's.
    """

    rank: int
    name: str
    own_name: str
    num_padding: int
    gradient: TensorPrint | None
    weight: TensorPrint


class UnknownPiece(msgspec.Struct, frozen=True, array_like=True):
    """A parameter of a rank of another recording whose start values this process has nowhere."""

    rank: int
    name: str


class ForwardCall(msgspec.Struct, frozen=True, kw_only=True):
    """A forward pass of the outermost module: one in training mode, or one in eval mode that has a backward pass.

    `samples` has a key for each of the first samples. `num_targets` is the number of labels, or of tokens that are no
    padding, and 0 if the inputs of the model do not say it. `is_weighted`: the script gives the model the count by
    which the loss is divided. `random_state` has the digest of the random numbers' state before the pass, and 0 if the
    pass drew none. `inactive` has the names of the dropout and BatchNorm modules that are in eval mode.

    `is_fed`: its inputs were those of another recording. `returns_loss`: one of its outputs is a number that needs a
    gradient, so the targets went through the model.
    """

    module: str
    has_parameters: bool
    samples: tuple[int, ...]
    num_samples: int
    line: str
    is_fed: bool = False
    returns_loss: bool = False
    num_targets: int = 0
    is_weighted: bool = False
    random_state: int = 0
    is_training: bool = True
    inactive: tuple[str, ...] = ()
    row_shape: tuple[int, ...] = ()
    """The shape of one sample in the first input that has one."""


class LoaderUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a data loader since the step before.

    The loader is in its pass number `passes` through the data, has given `batches`, and `last` is the number of the
    last one in its pass. `epoch` is that of a `DistributedSampler` that shuffles, in this pass. `is_restarted`: the
    pass before was not read to its end. `is_epoch_forgotten`: nobody has called `set_epoch` of the sampler.
    """

    loader: int
    num_workers: int
    is_iterable: bool
    passes: int
    batches: int
    last: int
    epoch: int | None = None
    is_restarted: bool = False
    is_epoch_forgotten: bool = False


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    rank: int
    world_size: int
    argv: tuple[str, ...]
    torch: str
    seed: int = 0
    """The last seed of torch's random numbers on the CPU; a large one if the script seeds nothing."""


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one optimizer on one rank. Step 0 has the weights before the first step.

    `own_gradients` has the projections of the gradients that this rank computed itself, for each backward pass.
    `gradients` are those with which the optimizer stepped. `num_discarded` counts the backward passes of the step whose
    gradients were set to zero before the step. A step without `has_prints` has no gradients and no weights.
    """

    step: int
    optimizer: int
    optimizer_class: str
    optimizer_name: str = ""
    """The variable of the script that has the optimizer."""
    has_prints: bool = True
    groups: tuple[dict[str, Any], ...]
    gradients: dict[str, TensorPrint] = {}
    weights: dict[str, TensorPrint] = {}
    digests_before: dict[str, int] = {}
    """The digests of a few small parameters just before the step: what happened to them since the last one."""
    own_gradients: dict[str, tuple[tuple[float, ...], ...]] = {}
    own_eps: float = 0.0
    eps: float = 0.0
    """The machine epsilon of the coarsest type in which a module of the model computed."""
    num_discarded: int = 0
    calls: tuple[ForwardCall, ...] = ()
    buffers: dict[str, int] = {}
    wrappers: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()
    sharding: str = ""
    """`fsdp`, `tensor` if weights are split otherwise, or "" if each rank has all of them."""
    scheduler_steps: tuple[int, ...] = ()
    """How far each learning rate scheduler of this optimizer is."""
    lines: dict[str, str] = {}
    """The user's lines that called `backward` and `step`, as `file:number`."""
    loaders: tuple[LoaderUse, ...] = ()
    loss_scales: tuple[float, ...] = ()
    """The scale of each `GradScaler` at the step."""
    shapes: dict[str, tuple[int, ...]] = {}
    """The shapes of the weights on this rank, before the first step."""
    pieces: tuple[PiecePrint, ...] = ()
    """The parameters of the ranks whose batches this process gets, if they hold the model in pieces."""
    unknown_pieces: tuple[UnknownPiece, ...] = ()
    made_before: int = 0
    """The steps that the state of the optimizer had before the first recorded one."""
    unreadable: tuple[str, ...] = ()
    """Tensors that can't be summarized, with the reason."""
    framework: str = ""
    """`Lightning`, if it runs the loop."""


class RecorderFault(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a rank whose recorder has failed."""

    fault: str


class ScriptRecording(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a recording: its command, and how it was recorded. `steps` is 0 if the command ended by itself."""

    command: tuple[str, ...]
    steps: int
    every: int = 1
    seed: int | None = None
    has_batches: bool = False
    fed: str = ""
    """The folder of the recording whose batches it got."""


def write_origin(folder: Path, origin: ScriptRecording) -> None:
    """Write the origin of a recording."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _ORIGIN_FILE).write_bytes(msgspec.json.encode(origin))


def read_origin(folder: Path) -> ScriptRecording | None:
    """Return the origin of a recording of a script; None if the folder has none.

    Raises:
        UsageError: the file can't be read.
    """
    file = folder / _ORIGIN_FILE
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=ScriptRecording)
    except (msgspec.MsgspecError, OSError) as error:
        raise UsageError(
            f"{file} is not of a recording of a script: {error}.", hint="record the script again"
        ) from None


def has_batches(folder: Path) -> bool:
    """Return whether a recording has batches, which can be fed to another run."""
    return any((folder / BATCH_FOLDER).glob("rank-*/*.safetensors"))


def encode_line(line: RecordingHeader | StepLine | RecorderFault) -> bytes:
    """Return a line of a recording; numbers that are not finite are written as Python's `json` reads them."""
    return json.dumps(msgspec.to_builtins(line)).encode() + b"\n"


def recording_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{rank}.jsonl"


def last_step_file(folder: Path, rank: int) -> Path:
    """Return the file that a rank writes when it has made the last step that is recorded."""
    return folder / f"done-{rank}"


def has_reached_last_step(folder: Path, world_size: int) -> bool:
    """Return whether all ranks have made the last step that is recorded."""
    return len(list(folder.glob("done-*"))) >= world_size


class RankRecording(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file of one rank."""

    header: RecordingHeader
    steps: tuple[StepLine, ...]
    fault: str


def read_rank_recordings(folder: Path) -> list[RankRecording]:
    """Return the recordings of all ranks, in their order; an incomplete last line is left out.

    Raises:
        UsageError: a line can't be read.
    """
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.partition("-")[2]))
    return [_read_file(file) for file in files]


def _read_file(file: Path) -> RankRecording:
    lines = file.read_bytes().splitlines(keepends=True)
    steps, fault = list[StepLine](), ""
    try:
        header = msgspec.convert(json.loads(lines[0]), RecordingHeader)
        for line in lines[1:]:
            if not line.endswith(b"\n"):
                break
            value = json.loads(line)
            if "fault" in value:
                fault = msgspec.convert(value, RecorderFault).fault
            else:
                steps.append(msgspec.convert(value, StepLine))
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{file} is not a recording of a script: {error}.", hint="record the script again") from None
    return RankRecording(header=header, steps=tuple(steps), fault=fault)
