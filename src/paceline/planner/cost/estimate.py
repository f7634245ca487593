"""Define the `Estimate` of a candidate: its forecast memory, step time and price in one value."""

from dataclasses import dataclass

from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import Memory
from paceline.planner.cost.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class MeasuredTime:
    """The measured step time of a layout on the target cluster. The field names are keys of plan.json."""

    seconds: float
    """The median seconds of a step."""
    spread: float
    """Half the interquartile range, as a fraction of `seconds`; 0 if it is unknown."""
    steps: int
    """The number of timed steps."""
    blocks: tuple[int, ...]
    """The block counts of the timed models. If they are smaller than the model's, `seconds` is extrapolated."""
    between: tuple[float, float] = (0.0, 0.0)
    """The start and the end of the timing, in seconds since the epoch. Other layouts were timed in between."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The forecast of a candidate: the memory of its fullest rank, the time of a step, and the price if it is known."""

    candidate: Candidate
    memory: Memory
    seconds: StepTime
    """The forecast seconds, scaled to `measured_time` if there is one."""
    stages: tuple[int, ...]
    """The number of blocks of each stage; empty without a pipeline."""
    num_micro: int
    """The number of microbatches of a replica in a step."""
    limit_bytes: float
    """The part of a device's memory that the layout may use."""
    device_bytes: float
    """The full memory of a device."""
    samples: int
    """The samples of a step."""
    length: int
    """The positions of a sample; 1 if samples have no length."""
    is_gpu: bool
    """True if the devices are GPUs or other accelerators, not CPUs."""
    model_flops: float
    """The model FLOPs of a step over all ranks."""
    peak_flops_per_second: float
    """The peak rate of one device in the precision of matmuls."""
    margin_bytes: float = 0.0
    """The error margin of `peak_bytes`."""
    host_limit_bytes: float | None = None
    """A rank's share of its host's memory; None if it is unknown."""
    price: float | None = None
    """The price of one step, in `currency`."""
    currency: str = ""
    measured_time: MeasuredTime | None = None
    """The measured step time; None if the layout was not timed."""

    @property
    def layout(self) -> str:
        """The value to type after `--layout`."""
        return self.candidate.layout

    @property
    def peak_bytes(self) -> float:
        """The peak memory of the fullest rank."""
        return self.memory.peak_bytes

    @property
    def step_seconds(self) -> float:
        """The seconds of one optimizer step."""
        return self.seconds.step_seconds

    @property
    def mfu(self) -> float:
        """The model FLOPs utilization: see `model_costs.training_flops`."""
        return self.model_flops / (self.step_seconds * self.candidate.ranks * self.peak_flops_per_second)

    @property
    def samples_per_second_per_device(self) -> float:
        """The samples per second of the whole run divided by the number of ranks."""
        return self.samples / self.step_seconds / self.candidate.ranks

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """The tokens per second divided by the number of ranks; None if samples have no length."""
        return self.length * self.samples_per_second_per_device if self.length > 1 else None

    @property
    def fits_host(self) -> bool:
        """True if the offloaded state fits on the host, or if the host's memory is unknown."""
        return self.host_limit_bytes is None or self.memory.host_bytes <= self.host_limit_bytes

    @property
    def fits(self) -> bool:
        """True if no rank needs more memory than it has, even if the forecast is off by its margin."""
        return self.fits_on(self.limit_bytes)

    def fits_on(self, limit_bytes: float) -> bool:
        """Return True if the candidate would fit on a device with `limit_bytes` of memory."""
        return self.peak_bytes + self.margin_bytes <= limit_bytes and self.fits_host

    @property
    def is_tight(self) -> bool:
        """True if the peak is so close to the limit that the forecast cannot tell whether the candidate fits."""
        return not self.fits and self.over_bytes <= self.margin_bytes and self.fits_host

    @property
    def over_bytes(self) -> float:
        """The bytes by which the peak exceeds the limit; negative if the peak is below the limit."""
        return self.peak_bytes - self.limit_bytes

    @property
    def settings(self) -> dict[str, str]:
        """The settings to type besides the layout."""
        settings = {"train.micro_batch_size": str(self.candidate.micro_batch_size)}
        if self.candidate.precision != "fp32":
            settings["train.precision"] = self.candidate.precision
        if self.candidate.compiles:
            settings["train.compile"] = "true"
        if len(set(self.stages)) > 1:
            settings["place.stages"] = ",".join(map(str, self.stages))
        return settings
