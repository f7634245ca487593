"""Store the results of a machine benchmark (probe): rates of devices, links and disk, and times derived from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any

from paceline.bytes_sent import SENT_BYTES_PER_BYTE
from paceline.errors import MachineError
from paceline.planner.hardware.timing_curve import TimingCurve, read_curve

FORMAT = 1
HEAD_WIDTH = 64  # the measured width; other widths are converted to a number of such heads
ATTENTION_FLOPS, TRAINED_ATTENTION_FLOPS = 4, 14  # of a head, forward and with backward, divided by length² × width
_MAX_OTHER_LOAD = 0.2
_RERUN_HINT = "probe_here(ranks=N, again=True) measures again"


@dataclass(frozen=True, kw_only=True)
class MachineFingerprint:
    """The conditions of a probe. `kernels` says whether torch's default kernels ran or those of exact mode.

    `threads` is the number of threads of one rank.
    """

    cpu: str
    cores: int
    torch: str
    gpus: tuple[str, ...]
    kernels: str
    device: str
    ranks: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class MatmulTimings:
    """The timings of matmuls in one precision.

    `square` gives the seconds of a square matmul by its FLOPs (a multiply-add is two).

    `narrow` has pairs: the smallest dimension of a matmul, ascending, and its time relative to a square matmul.
    """

    square: TimingCurve
    narrow: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of each of several processes that compute on a machine at the same time."""

    busy: int
    """The number of processes."""
    threads: int
    """The threads of each process."""
    products: Mapping[str, MatmulTimings]
    """The timings of matmuls, by precision."""
    attention: Mapping[str, TimingCurve]
    """The forward seconds of a head by its FLOPs, by precision."""
    attention_trained: Mapping[str, TimingCurve]
    """The forward and backward seconds of a head by its FLOPs, by precision."""
    streams: Mapping[str, TimingCurve]
    """The seconds of memory-bound operations by bytes read and written.

    `copy` writes to existing memory; `add`, `gelu` and `norm` write to new memory.
    """
    optimizers: Mapping[str, TimingCurve]
    """The seconds of an update of one tensor by bytes read and written."""
    operation_seconds: float
    """The seconds of an operation on almost no data."""
    trained_operation_seconds: float
    """The same with its backward."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTimings:
    """The timings of one kind of collective among `ranks`: seconds by the bytes of a rank (see `SHARES`)."""

    kind: str
    ranks: int
    curve: TimingCurve

    @property
    def latency_seconds(self) -> float:
        """The seconds of a collective without data."""
        return self.curve.seconds(0)

    @property
    def line_rate(self) -> float:
        """The bytes per second that leave a rank in large collectives."""
        return self.curve.end_rate * SENT_BYTES_PER_BYTE[self.kind](self.ranks)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The bytes per second of each rank while all ranks write a file (flushed to disk) or read one (uncached)."""

    folder: str
    write_rate: float
    read_rate: float


@dataclass(frozen=True, kw_only=True)
class HardwareBenchmark:
    """The results of a probe. The field names are keys of the probe's file.

    `copies` (`to_device`, `to_host`) are seconds by bytes of pinned memory, if the machine has GPUs. `others` is the
    fraction of the machine's cores that other programs used during the probe, None if unknown.
    """

    fingerprint: MachineFingerprint
    backend: str
    took_seconds: float
    rates: tuple[Rates, ...]
    collectives: tuple[CollectiveTimings, ...] = ()
    copies: Mapping[str, TimingCurve] = field(default_factory=dict)
    disk: Disk | None = None
    others: float | None = None

    @property
    def is_quiet(self) -> bool:
        """False if other programs used the machine during the probe, so that the measured rates are too low."""
        return self.others is None or self.others <= _MAX_OTHER_LOAD

    def rates_for(self, busy: int) -> Rates:
        """Return the rates of the smallest measured process count of at least `busy`, or else the largest."""
        large_enough = [rates for rates in self.rates if rates.busy >= busy]
        if large_enough:
            return min(large_enough, key=lambda rates: rates.busy)
        return max(self.rates, key=lambda rates: rates.busy)

    def collective_seconds(self, kind: str, *, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a collective of `num_bytes`, scaled from the nearest measured group size.

        Raises:
            MachineError: the probe has no such collective.
        """
        if ranks == 1:
            return 0.0
        same_kind = [collective for collective in self.collectives if collective.kind == kind]
        if not same_kind:
            raise MachineError(
                f"the probe has no {kind}.", cause=_available_text([c.kind for c in self.collectives]), hint=_RERUN_HINT
            )
        nearest = min(same_kind, key=lambda collective: (abs(log(collective.ranks / ranks)), collective.ranks))
        sent_fraction = SENT_BYTES_PER_BYTE[kind]
        scaled_bytes = num_bytes * sent_fraction(ranks) / sent_fraction(nearest.ranks)
        rounds = 1.0 if kind == "send" else (ranks - 1) / (nearest.ranks - 1)
        return nearest.curve.seconds(scaled_bytes) + nearest.latency_seconds * (rounds - 1)

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the format number, for a file that `read_probe` reads."""
        return {"format": FORMAT, **asdict(self)}


def read_probe(stored: Mapping[str, Any]) -> HardwareBenchmark:
    """Return the results that `HardwareBenchmark.as_json` wrote.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is not valid, or of another version.
    """
    fields = dict(stored)
    if fields.pop("format") != FORMAT or not fields["rates"]:
        raise ValueError("a probe of another version of Paceline, or an empty one")
    fingerprint = fields["fingerprint"]
    fields["fingerprint"] = MachineFingerprint(**{**fingerprint, "gpus": tuple(fingerprint["gpus"])})
    fields["rates"] = tuple(map(_read_rates, fields["rates"]))
    fields["collectives"] = tuple(
        CollectiveTimings(**{**each, "curve": read_curve(each["curve"])}) for each in fields["collectives"]
    )
    fields["copies"] = _read_curves(fields["copies"])
    fields["disk"] = None if fields["disk"] is None else Disk(**fields["disk"])
    fields["others"] = None if fields["others"] is None else float(fields["others"])
    fields["took_seconds"] = float(fields["took_seconds"])
    return HardwareBenchmark(**fields)


def _read_rates(stored: Mapping[str, Any]) -> Rates:
    curves = {name: _read_curves(stored[name]) for name in ("attention", "attention_trained", "streams", "optimizers")}
    products = {
        precision: MatmulTimings(
            square=read_curve(each["square"]), narrow=tuple((int(least), slow) for least, slow in each["narrow"])
        )
        for precision, each in stored["products"].items()
    }
    return Rates(**{**stored, **curves, "products": products})


def _read_curves(stored: Mapping[str, Any]) -> dict[str, TimingCurve]:
    return {name: read_curve(each) for name, each in stored.items()}


def _available_text(names: Any) -> str:
    return f"it has {', '.join(dict.fromkeys(names)) or 'none'}"
