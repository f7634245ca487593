"""Parse a layout: how the model is placed on the ranks, as requested on the command line; works without torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TypeVar

from typing_extensions import override

from paceline.config.activation_checkpointing import parse_remat
from paceline.config.axis_counts import REMAINING_RANKS, is_count, read_size, read_virtual
from paceline.config.parse_auto_layout import AUTO
from paceline.config.update_rule import UpdateKind as Rule
from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError, PacelineError, raise_all


class LayoutKind(StrEnum):
    """The layouts that have a name; `AXES` is any layout that was written as axes."""

    SINGLE = "single"
    THREADS = "threads"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    HSDP = "hsdp"
    TP = "tp"
    PP = "pp"
    CP = "cp"
    EP = "ep"
    AXES = "axes"


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
OPTIONS = ("zero", "schedule", "virtual", "remat", "offload", "sequence", "params")
_KIND_NAMES = [str(kind) for kind in LayoutKind if kind is not LayoutKind.AXES]
_ALIASES = {"dp": "dp_replicate", "zero3": "fsdp", "fsdp2": "fsdp", "deepspeed": "fsdp"}
_AXIS_AND_ZERO_STAGE = {  # the axis that the name of a layout stands for, and its ZeRO stage (0: not ZeRO)
    LayoutKind.DDP: ("dp_replicate", 0),
    LayoutKind.ZERO1: ("dp_shard", 1),
    LayoutKind.ZERO2: ("dp_shard", 2),
    LayoutKind.FSDP: ("dp_shard", 3),
    LayoutKind.TP: ("tp", 0),
    LayoutKind.PP: ("pp", 0),
    LayoutKind.CP: ("cp", 0),
    LayoutKind.EP: ("ep", 0),
}
_OFFLOADS = ("optimizer", "parameters")
_THREADS_ARE_ALONE = "replicas as threads of one process can't be combined with anything else"
_THREADS_HINT = "--layout threads=2, or --layout dp=2"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout as the user requested it."""

    kind: LayoutKind
    sizes: dict[str, int] = field(default_factory=dict)
    """The size of each requested axis. `REMAINING_RANKS` stands for all ranks that are left."""
    threads: int | None = None
    """The number of replicas, which are threads of one process; None if `--ranks` gives it."""
    zero: int = 3
    """The ZeRO stage of `dp_shard`; 3 is FSDP."""
    schedule: str = "1f1b"
    virtual: int | None = None
    """The number of pipeline stages on each rank; None for the schedule's default."""
    remat: str = "none"
    offload: tuple[str, ...] = ()
    sequence: bool = False
    params: str = "fp32"
    """The dtype in which fsdp gathers parameters."""

    @override
    def __str__(self) -> str:
        """Return text that `parse_layout` parses to the same layout."""
        if self.kind is LayoutKind.THREADS and self.threads is not None:
            return f"threads={self.threads}"
        kind_name = [] if self.kind is LayoutKind.AXES else [str(self.kind)]
        implied_axis = _AXIS_AND_ZERO_STAGE.get(self.kind, ("", 0))[0]
        axes = [
            f"{axis}={n}"
            for axis in AXES
            if (n := self.sizes.get(axis)) and (axis, n) != (implied_axis, REMAINING_RANKS)
        ]
        return ",".join([*kind_name, *axes, *self.options()])

    def options(self) -> list[str]:
        """Return the options that differ from their defaults, as text."""
        zero = (
            self.zero
            if _AXIS_AND_ZERO_STAGE.get(self.kind, ("", 3))[1] != self.zero and "dp_shard" in self.sizes
            else 3
        )
        values = {
            "zero": zero if zero != 3 else "",
            "schedule": self.schedule if self.schedule != "1f1b" else "",
            "virtual": self.virtual or "",
            "remat": self.remat if self.remat != "none" else "",
            "offload": "+".join(self.offload),
            "sequence": "true" if self.sequence else "",
            "params": self.params if self.params != "fp32" else "",
        }
        return [f"{name}={value}" for name, value in values.items() if value]

    @property
    def ranks(self) -> int | None:
        """Return the number of ranks of this layout, or None if it does not determine the number."""
        if self.kind is LayoutKind.THREADS:
            return self.threads
        sizes = [size for axis, size in self.sizes.items() if axis != "ep"]
        if self.kind is LayoutKind.SINGLE or REMAINING_RANKS in sizes or not sizes:
            return None
        return prod(sizes)

    def processes(self, *, ranks: int) -> int:
        """Return the number of processes for `ranks` ranks. It is 1 if the replicas are threads of one process."""
        return 1 if self.kind is LayoutKind.THREADS else ranks


def parse_layout(text: str) -> Layout:
    """Parse `ddp`, `threads=4`, `dp=4`, `fsdp,remat=full`, `pp=2,dp_shard=-1,tp=2,schedule=zb_h1`.

    Raises:
        LayoutError, Problems: the text is no layout, or is `auto`, which only `train`, `verify` and `pl.Run` accept.
    """
    problems: list[PacelineError] = []
    kind, sizes, options = LayoutKind.AXES, dict[str, int](), dict[str, str]()
    threads: int | None = None
    for position, item in enumerate(text.strip().split(",")):
        name, equals, value = (piece.strip() for piece in item.partition("="))
        name = _ALIASES.get(name.lower(), name.lower())
        if name in sizes or name in options:
            problems.append(_repeated_error(text, item.strip(), name))
        elif not equals and position == 0:
            kind = _parse_kind(text, name, problems)
        elif name == LayoutKind.THREADS and equals and kind is LayoutKind.AXES:
            kind, threads = LayoutKind.THREADS, read_size(item, value, problems)
        elif name in AXES and equals:
            sizes[name] = read_size(item, value, problems)
        elif name in OPTIONS and equals:
            options[name] = value
        else:
            problems.append(_unknown_axis_error(text, position, name, value))
    raise_all(problems)
    return _build_layout(text, kind, sizes, threads, options)


def _parse_kind(text: str, name: str, problems: list[PacelineError]) -> LayoutKind:
    if name == AUTO:
        message = f"{text!r}: auto can't be combined, and only train, verify and pl.Run accept it."
        hint = "paceline plan JOB --ranks 2 shows what train would choose; pass that to --layout"
        problems.append(LayoutError(message, cause="other commands need a certain layout", hint=hint))
    elif name not in _KIND_NAMES:
        message, known_layouts = f"{text!r} is not a layout.", [*_KIND_NAMES, AUTO]
        if name in set(Rule):
            raise LayoutError(message, cause="it is an update rule", hint=f"--update {text.strip()}")
        hint = f"--layout {' | '.join(_KIND_NAMES)} | threads=N | axes: dp_shard=2,tp=2"
        problems.append(LayoutError(message, cause=did_you_mean(name, known_layouts), hint=hint))
    return LayoutKind(name) if name in _KIND_NAMES else LayoutKind.AXES


def _repeated_error(text: str, item: str, name: str) -> LayoutError:
    without_repeat = ",".join(piece for piece in text.split(",") if piece.strip() != item) or text.split(",")[0]
    cause = "dp is short for dp_replicate" if name == "dp_replicate" else "each axis and each option may be given once"
    return LayoutError(f"{text!r} has {name} twice.", cause=cause, hint=f"--layout {without_repeat}")


def _unknown_axis_error(text: str, position: int, name: str, value: str) -> LayoutError:
    known_names = ["dp", *AXES, "threads", *OPTIONS]
    if name == LayoutKind.THREADS:
        return LayoutError(
            f"{text!r} combines threads with another layout.", cause=_THREADS_ARE_ALONE, hint=_THREADS_HINT
        )
    if name in _KIND_NAMES:
        problem = f"is a layout name and takes no count, got {value!r}" if value else "has no count"
        return LayoutError(
            f"{name!r} in {text!r} {problem}.",
            cause="a layout name comes first; anything else is written as axes",
            hint=f"--layout {_as_axes(text, position, LayoutKind(name), value if is_count(value) else '2')}",
        )
    if name in AXES:
        parts = text.split(",")
        return LayoutError(
            f"{name} in {text!r} has no size.",
            cause="the remaining ranks have to be asked for",
            hint=f"--layout {','.join(f'{name}=-1' if index == position else p for index, p in enumerate(parts))}",
        )
    if name in OPTIONS:
        return LayoutError(f"{name} in {text!r} has no value.", hint="the options: docs/layouts.md")
    return LayoutError(
        f"{name!r} in {text!r} is not an axis.",
        cause=did_you_mean(name, known_names),
        hint=f"one of {', '.join(known_names)}: dp=2",
    )


def _as_axes(text: str, position: int, kind: LayoutKind, count: str) -> str:
    """Return the layout text with the name at `position` written as axes; if that is invalid, the axes alone."""
    axis, zero = _AXIS_AND_ZERO_STAGE.get(kind, ("dp_shard", 0))
    axes = f"{axis}={count}{f',zero={zero}' if zero in (1, 2) else ''}"
    if kind is LayoutKind.HSDP:
        axes = f"dp_replicate=2,dp_shard={count}"
    elif kind is LayoutKind.SINGLE and not position:
        axes = "single"
    parts = text.split(",")
    parts[position] = axes
    try:
        parse_layout(",".join(parts))
    except PacelineError:
        return f"dp_replicate={count},{axes}" if kind is LayoutKind.EP else axes
    return ",".join(parts)


def _build_layout(
    text: str, kind: LayoutKind, sizes: dict[str, int], threads: int | None, options: dict[str, str]
) -> Layout:
    problems: list[PacelineError] = []
    has_no_axes = kind in (LayoutKind.THREADS, LayoutKind.SINGLE)
    if has_no_axes and (sizes or options):
        is_threads = kind is LayoutKind.THREADS
        hint = _THREADS_HINT if is_threads else "--layout dp=2, or single alone"
        cause = _THREADS_ARE_ALONE if is_threads else "single takes no axes and no options"
        problems.append(LayoutError(f"{text!r} combines {kind} with something else.", cause=cause, hint=hint))
    if not has_no_axes:
        if kind is LayoutKind.HSDP:
            sizes = {**sizes} if {"dp_replicate", "dp_shard"} & set(sizes) else {**sizes, "dp_shard": REMAINING_RANKS}
        elif kind in _AXIS_AND_ZERO_STAGE:
            sizes.setdefault(_AXIS_AND_ZERO_STAGE[kind][0], REMAINING_RANKS)
        if list(sizes.values()).count(REMAINING_RANKS) > 1:
            first_axis, *other_axes = (axis for axis, size in sizes.items() if size == REMAINING_RANKS)
            example = ",".join(f"{axis}={2 if axis in other_axes else size}" for axis, size in sizes.items())
            cause = f"{first_axis} and {other_axes[0]} would both take the remaining ranks"
            problems.append(
                LayoutError(
                    f"{text!r}: at most one axis may be {REMAINING_RANKS}.", cause=cause, hint=f"--layout {example}"
                )
            )
    zero = _AXIS_AND_ZERO_STAGE.get(kind, ("", 3))[1] or 3
    layout = Layout(
        kind=kind,
        sizes=sizes,
        threads=None if threads == REMAINING_RANKS else threads,
        zero=_parse_choice("zero", options.get("zero", str(zero)), ("1", "2", "3"), problems, int, zero),
        schedule=_normalize_schedule(options.get("schedule", "1f1b")),
        virtual=read_virtual(options.get("virtual"), problems),
        remat=_normalize_remat(options.get("remat", "none"), problems),
        offload=_parse_offload(options.get("offload", ""), problems),
        sequence=_parse_choice(
            "sequence", options.get("sequence", "false"), ("true", "false"), problems, _is_true, False
        ),
        params=_parse_choice("params", options.get("params", "fp32"), ("fp32", "bf16"), problems, str, "fp32"),
    )
    problems += _options_without_axis(layout, options)
    raise_all(problems)
    return layout


def _parse_choice(
    name: str,
    value: str,
    choices: tuple[str, ...],
    problems: list[PacelineError],
    convert: Callable[[str], _T],
    default: _T,
) -> _T:
    if value.lower() in choices:
        return convert(value.lower())
    problems.append(LayoutError(f"{name}={value} is not valid.", hint=f"{name}= {' | '.join(choices)}"))
    return default


def _is_true(text: str) -> bool:
    return text == "true"


def _normalize_remat(text: str, problems: list[PacelineError]) -> str:
    try:
        return str(parse_remat(text))
    except LayoutError as error:
        problems.append(error)
        return "none"


def _normalize_schedule(text: str) -> str:
    """Return a schedule's name in lower case, or the path of a file unchanged."""
    return text if "/" in text or "." in text else text.lower()


def _parse_offload(value: str, problems: list[PacelineError]) -> tuple[str, ...]:
    requested = tuple(part.strip().lower() for part in value.split("+") if part.strip() and part.strip() != "none")
    unknown = [part for part in requested if part not in _OFFLOADS]
    if unknown:
        problems.append(
            LayoutError(f"offload={value}: {unknown[0]!r} is not valid.", hint="offload=optimizer+parameters")
        )
    return tuple(part for part in _OFFLOADS if part in requested)


def _options_without_axis(layout: Layout, options: dict[str, str]) -> list[PacelineError]:
    """Return errors for options of an axis that was not requested, and for options that contradict the ZeRO stage."""
    axis_of_option = {"zero": "dp_shard", "offload": "dp_shard", "params": "dp_shard"}
    axis_of_option |= {"schedule": "pp", "virtual": "pp", "sequence": "tp"}
    problems: list[PacelineError] = [
        LayoutError(f"{name}={options[name]} is an option of {axis}, and the layout has no {axis}.", hint=f"{axis}=2")
        for name, axis in axis_of_option.items()
        if name in options and layout.sizes.get(axis, 1) == 1 and layout.kind is not LayoutKind.HSDP
    ]
    return [*problems, *_zero_stage_conflicts(layout, options)]


def _zero_stage_conflicts(layout: Layout, options: dict[str, str]) -> Iterator[LayoutError]:
    """Yield errors for options that contradict the ZeRO stage, or that require stage 3."""
    if (stage := _AXIS_AND_ZERO_STAGE.get(layout.kind, ("", 0))[1]) and layout.zero != stage:
        yield LayoutError(
            f"{layout.kind} is ZeRO stage {stage}, which contradicts zero={layout.zero}.",
            cause=f"the name {layout.kind} already sets the stage; only dp_shard and hsdp accept zero=",
            hint=f"--layout {('zero1', 'zero2', 'fsdp')[layout.zero - 1]}",
        )
    elif layout.zero != 3 and "params" in options and layout.params != "fp32":
        yield LayoutError(
            f"params={layout.params} with ZeRO stage {layout.zero} is not supported: only stage 3 gathers parameters.",
            cause="params= is the dtype in which fsdp gathers parameters",
            hint=f"--layout fsdp,params={layout.params}, or --train.precision bf16",
        )
    elif layout.zero != 3 and "parameters" in layout.offload:
        yield LayoutError(
            f"offload=parameters with ZeRO stage {layout.zero} is not supported: each rank keeps all parameters.",
            cause="only parameters that fsdp frees after use can be offloaded until the next use",
            hint="--layout fsdp,offload=parameters, or offload=optimizer",
        )
