"""What a candidate is forecast to take, in one value."""

from dataclasses import dataclass

from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import Memory
from paceline.planner.cost.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class MeasuredTime:
    """What steps took where they would run. `spread` is half of what the middle half of them spans, as a part of
    `seconds`; `blocks` are those of the models that were run: where they were fewer than the model has, `seconds` goes
    on from there in a straight line. They ran `between` two times, seconds since the epoch, in turn with other layouts.
    """

    seconds: float
    spread: float
    steps: int
    blocks: tuple[int, ...]
    between: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a candidate is forecast to take: bytes of its fullest rank, seconds of its step, money where it is known.

    `stages` are the blocks of each stage; `limit_bytes` is what it may take of a device's `device_bytes`,
    `host_limit_bytes` a rank's share of its host's, None where it is not known. The peak may be off by `margin_bytes`.
    `price` is that of one step. Where it was `timed`, `seconds` are those. A step has `samples` of `length` positions,
    and needs `model_flops` of all ranks, each of which can do `peak_flops_per_second` in the precision of the products.
    """

    candidate: Candidate
    memory: Memory
    seconds: StepTime
    stages: tuple[int, ...]
    num_micro: int
    limit_bytes: float
    device_bytes: float
    samples: int
    length: int
    is_gpu: bool
    model_flops: float
    peak_flops_per_second: float
    margin_bytes: float = 0.0
    host_limit_bytes: float | None = None
    price: float | None = None
    currency: str = ""
    timed: MeasuredTime | None = None

    @property
    def layout(self) -> str:
        """What to type after `--layout`."""
        return self.candidate.layout

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return self.memory.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return self.seconds.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: see `utilization`."""
        return self.model_flops / (self.step_seconds * self.candidate.ranks * self.peak_flops_per_second)

    @property
    def samples_per_second_per_device(self) -> float:
        """Of the global batch, shared among all ranks."""
        return self.samples / self.step_seconds / self.candidate.ranks

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """None where samples have no length."""
        return self.length * self.samples_per_second_per_device if self.length > 1 else None

    @property
    def fits_host(self) -> bool:
        """Whether the host holds what is kept there, as far as its memory is known."""
        return self.host_limit_bytes is None or self.memory.host_bytes <= self.host_limit_bytes

    @property
    def fits(self) -> bool:
        """Whether no rank needs more than it has, even if the forecast is off by its margin."""
        return self.fits_on(self.limit_bytes)

    def fits_on(self, limit_bytes: float) -> bool:
        """Whether it would on a device with so much memory."""
        return self.peak_bytes + self.margin_bytes <= limit_bytes and self.fits_host

    @property
    def is_tight(self) -> bool:
        """Whether the peak is so near the limit, below or above, that no forecast can tell if it fits."""
        return not self.fits and self.over_bytes <= self.margin_bytes and self.fits_host

    @property
    def over_bytes(self) -> float:
        """How much more it is than it may be; negative: how much less."""
        return self.peak_bytes - self.limit_bytes

    @property
    def settings(self) -> dict[str, str]:
        """What to type beside the layout."""
        found = {"train.micro_batch_size": str(self.candidate.micro_batch_size)}
        if self.candidate.precision != "fp32":
            found["train.precision"] = self.candidate.precision
        if self.candidate.compiles:
            found["train.compile"] = "true"
        if len(set(self.stages)) > 1:
            found["place.stages"] = ",".join(map(str, self.stages))
        return found
