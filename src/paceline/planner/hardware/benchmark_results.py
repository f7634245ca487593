"""Results of a probe of this machine: speeds of devices, links and disk, and the times derived from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any

from paceline.bytes_sent import SHARES
from paceline.errors import MachineError
from paceline.planner.hardware.timing_curve import TimingCurve, read_curve

FORMAT = 1
HEAD_WIDTH = 64  # measured width; other widths count as more or fewer heads
ATTENTION_WORK, TRAINED_WORK = 4, 14  # FLOPs of a head, in units of length² × width
_QUIET = 0.2
_AGAIN = "probe_here(ranks=N, again=True) measures again"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The conditions a probe holds for. `kernels` are those of exact mode or the defaults; `threads` are a rank's."""

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
    """The timings of matmuls in one precision. `square` is seconds by FLOPs (a multiply-add is two).

    `narrow` are smallest dimensions, in ascending order, each with the time of such a matmul relative to a square one.
    """

    square: TimingCurve
    narrow: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of each of `busy` processes that compute on a machine at the same time, with `threads` each.

    `attention` and `attention_trained` (forward with backward) are seconds of a head by its FLOPs. `streams` are
    memory-bound operations (`copy` into existing memory, `add`, `gelu`, `norm` into new memory), in seconds by bytes
    read and written. `optimizers` are seconds by bytes read and written for one tensor. `operation_seconds` is the time
    of an operation on almost no data, `trained_operation_seconds` with its backward.
    """

    busy: int
    threads: int
    products: Mapping[str, MatmulTimings]
    attention: Mapping[str, TimingCurve]
    attention_trained: Mapping[str, TimingCurve]
    streams: Mapping[str, TimingCurve]
    optimizers: Mapping[str, TimingCurve]
    operation_seconds: float
    trained_operation_seconds: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The timings of one kind of collective among `ranks`: seconds by the bytes of a rank, as `SHARES` counts them."""

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
        return self.curve.end_rate * SHARES[self.kind](self.ranks)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The bytes per second of each rank's file, with all ranks writing (flushed to disk) or reading (uncached)."""

    folder: str
    write_rate: float
    read_rate: float


@dataclass(frozen=True, kw_only=True)
class HardwareBenchmark:
    """The results of a probe. `copies` (`to_device`, `to_host`) are seconds by bytes from pinned memory, with a GPU.

    `others` is the share of the machine's cores that other programs used during the probe, None if unknown.
    """

    fingerprint: Fingerprint
    backend: str
    took_seconds: float
    rates: tuple[Rates, ...]
    collectives: tuple[Collective, ...] = ()
    copies: Mapping[str, TimingCurve] = field(default_factory=dict)
    disk: Disk | None = None
    others: float | None = None

    @property
    def is_quiet(self) -> bool:
        """True if little else ran on the machine, or if that is unknown; otherwise the rates are too low."""
        return self.others is None or self.others <= _QUIET

    def of_busy(self, busy: int) -> Rates:
        """Return the rates for this many busy processes: those of the next larger number, else of the largest."""
        enough = [each for each in self.rates if each.busy >= busy]
        return min(enough, key=lambda each: each.busy) if enough else max(self.rates, key=lambda each: each.busy)

    def collective_seconds(self, kind: str, *, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a collective of `num_bytes`; other group sizes are scaled from the nearest.

        Raises:
            MachineError: the probe has no such collective.
        """
        if ranks == 1:
            return 0.0
        had = [each for each in self.collectives if each.kind == kind]
        if not had:
            raise MachineError(f"the probe has no {kind}.", cause=_has([c.kind for c in self.collectives]), hint=_AGAIN)
        nearest = min(had, key=lambda each: (abs(log(each.ranks / ranks)), each.ranks))
        share = SHARES[kind]
        alike = num_bytes * share(ranks) / share(nearest.ranks)
        rounds = 1.0 if kind == "send" else (ranks - 1) / (nearest.ranks - 1)
        return nearest.curve.seconds(alike) + nearest.latency_seconds * (rounds - 1)

    def as_json(self) -> dict[str, Any]:
        """Return its fields and the format, for a file; `read_probe` reads them back."""
        return {"format": FORMAT, **asdict(self)}


def read_probe(found: Mapping[str, Any]) -> HardwareBenchmark:
    """Return the results that `HardwareBenchmark.as_json` wrote.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is not valid, or of another version.
    """
    own = dict(found)
    if own.pop("format") != FORMAT or not own["rates"]:
        raise ValueError("a probe of another version of Paceline, or an empty one")
    mark = own["fingerprint"]
    own["fingerprint"] = Fingerprint(**{**mark, "gpus": tuple(mark["gpus"])})
    own["rates"] = tuple(map(_read_rates, own["rates"]))
    own["collectives"] = tuple(
        Collective(**{**each, "curve": read_curve(each["curve"])}) for each in own["collectives"]
    )
    own["copies"] = _read_curves(own["copies"])
    own["disk"] = None if own["disk"] is None else Disk(**own["disk"])
    own["others"] = None if own["others"] is None else float(own["others"])
    own["took_seconds"] = float(own["took_seconds"])
    return HardwareBenchmark(**own)


def _read_rates(found: Mapping[str, Any]) -> Rates:
    curves = {name: _read_curves(found[name]) for name in ("attention", "attention_trained", "streams", "optimizers")}
    products = {
        precision: MatmulTimings(
            square=read_curve(each["square"]), narrow=tuple((int(least), slow) for least, slow in each["narrow"])
        )
        for precision, each in found["products"].items()
    }
    return Rates(**{**found, **curves, "products": products})


def _read_curves(found: Mapping[str, Any]) -> dict[str, TimingCurve]:
    return {name: read_curve(each) for name, each in found.items()}


def _has(names: Any) -> str:
    return f"it has {', '.join(dict.fromkeys(names)) or 'none'}"
