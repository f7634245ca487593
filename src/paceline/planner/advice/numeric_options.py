"""Find options that change the numerics of training, and forecast the gain of each. A plan never recommends them.

The layouts of a plan train like a single process, up to the rounding of sums. These options change more, so only the
user can choose them. `params=bf16` rounds every weight before use. Compiled blocks fuse operations, which then round
less often. With local SGD, replicas train apart for some steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size
from paceline.errors import PacelineError
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.model_costs.model_profile import ZERO, ModelProfile
from paceline.planner.search.branch_and_bound import search, sort_key
from paceline.planner.search.evaluate_named_layout import estimate_named
from paceline.planner.search.search_space import SearchSpace

_PARAMS_EFFECT = "weights are gathered and used in bfloat16, but one process uses them in float32"
_COMPILE_EFFECT = "fused operations round less often, and the first step waits for the compiler"
_LOCAL_STEPS = 8  # the default of `--update local`
_LOCAL_COPIES = 4  # the common weights and, when they are averaged, the changes, their message and their mean
_LOCAL_UPDATE = f"--update local,every={_LOCAL_STEPS}"
_LOCAL_EFFECT = f"each replica trains alone for {_LOCAL_STEPS} steps, and then all average their weights"
_MIN_SPEED_DIFFERENCE = 0.005
_NO_SELECTIVE_REASON = "a compiled block is recomputed as a whole"
_NO_TP_REASON = "torch.compile does not support tensors that tp shards over the ranks"


@dataclass(frozen=True, kw_only=True)
class NumericsOption:
    """An option that changes the numerics of training, and the best layout with it."""

    option: str
    """The option to type."""
    numeric_effect: str
    """How the option changes the numerics."""
    estimate: Estimate
    """The forecast of the best layout with the option."""
    recommended_seconds: float
    """The forecast step time of the recommended layout, which does not use the option."""
    update: str = ""
    """The option `--update` to type; empty for the synchronous update of all other layouts."""

    @property
    def command(self) -> str:
        """All options to type for the best layout."""
        typed = "".join(f" --{name} {value}" for name, value in self.estimate.settings.items())
        return f"--layout {self.estimate.layout}{typed}" + (f" {self.update}" if self.update else "")

    def as_json(self) -> dict[str, Any]:
        """Return the values by name; `recommended_step_seconds` is the forecast of the recommended layout."""
        estimate = self.estimate
        return {
            "option": self.option,
            "changes": self.numeric_effect,
            "layout": estimate.layout,
            "settings": estimate.settings,
            "peak_bytes": round(estimate.peak_bytes),
            "step_seconds": estimate.step_seconds,
            "recommended_step_seconds": self.recommended_seconds,
            "tokens_per_second_per_device": estimate.tokens_per_second_per_device,
            "samples_per_second_per_device": estimate.samples_per_second_per_device,
            "mfu": estimate.mfu,
        }

    def lines(self) -> Iterator[str]:
        """Yield two lines of text: what to type, and the forecast."""
        estimate, ratio = self.estimate, self.recommended_seconds / self.estimate.step_seconds
        speed = f"{ratio:.2f} times as fast as" if ratio >= 1 else f"{1 / ratio:.2f} times as long as"
        speed = speed if abs(ratio - 1) >= _MIN_SPEED_DIFFERENCE else "as fast as"
        peak, seconds = format_size(round(estimate.peak_bytes)), format_precise_duration(estimate.step_seconds)
        summary = f"{peak}, {seconds} per step, MFU {estimate.mfu:.1%}"
        yield f"with {self.option}: {self.command}"
        yield f"  {summary} (forecast): {speed} the recommended one; {self.numeric_effect}"


def with_compiled_blocks(profile: ModelProfile) -> ModelProfile:
    """Return the profile of the same model with its blocks compiled."""
    refused = {
        **profile.refused,
        "tp": profile.refused.get("tp", _NO_TP_REASON),
        "remat=selective": _NO_SELECTIVE_REASON,
    }
    return replace(profile, compiles=True, refused=refused)


def find_numerics_options(cost_model: CostModel, recommended: Estimate, grid: SearchSpace) -> list[NumericsOption]:
    """Return each option that the model, the devices and the settings allow, with the fastest layout that fits."""
    profile, device = cost_model.profile, cost_model.cluster.device
    seconds = cost_model.seconds(recommended.candidate).step_seconds
    results = list[NumericsOption]()
    if device.rate("bf16") >= device.rate(profile.precision):
        estimates = search(cost_model, grid=replace(grid, zero=(3,), params=("bf16",))).best.values()
        with_bf16 = [estimate for estimate in estimates if estimate.candidate.params == "bf16"]
        results += _fastest("params=bf16", _PARAMS_EFFECT, with_bf16, seconds)
    if not profile.compiles and any(part.fused_bytes != ZERO for part in profile.blocks or (profile.first,)):
        estimates = search(cost_model.with_profile(with_compiled_blocks(profile)), grid=grid).best.values()
        results += _fastest("--train.compile true", _COMPILE_EFFECT, list(estimates), seconds)
    return [*results, *_local_sgd_option(cost_model, grid, seconds)]


def _local_sgd_option(cost_model: CostModel, grid: SearchSpace, recommended_seconds: float) -> Iterator[NumericsOption]:
    """Yield local SGD with ddp, if `ddp` on several nodes waits longer for gradients than for everything else.

    Replicas then send their weights once in several steps, and no compute hides that.
    """
    if cost_model.cluster.nodes == 1:
        return
    try:
        ddp = estimate_named(cost_model, "ddp", micro_batch_size=grid.micro_batch_size)
    except PacelineError:  # the model or the batch can't be replicated
        return
    profile, ratio = cost_model.profile, cost_model.time_ratio(ddp.candidate.family)
    weight_bytes = profile.element_bytes * profile.parameters
    round_seconds = cost_model.groups(ddp.candidate).data.all_reduce(weight_bytes)
    local = replace(
        ddp,
        seconds=replace(ddp.seconds, gradients=ratio * round_seconds / _LOCAL_STEPS),
        memory=replace(ddp.memory, buffers=ddp.memory.buffers + _LOCAL_COPIES * weight_bytes),
    )
    if local.fits and 2 * ddp.seconds.gradients >= ddp.step_seconds:
        yield NumericsOption(
            option=_LOCAL_UPDATE,
            numeric_effect=_LOCAL_EFFECT,
            estimate=local,
            recommended_seconds=recommended_seconds,
            update=_LOCAL_UPDATE,
        )


def _fastest(
    option: str, numeric_effect: str, estimates: Sequence[Estimate], recommended_seconds: float
) -> Iterator[NumericsOption]:
    """Yield the option with the fastest of its estimates, or nothing if there are no estimates."""
    if estimates:
        yield NumericsOption(
            option=option,
            numeric_effect=numeric_effect,
            estimate=min(estimates, key=sort_key),
            recommended_seconds=recommended_seconds,
        )


def option_lines(options: Sequence[NumericsOption]) -> Iterator[str]:
    """Yield a title and the lines of the options, or nothing if there are none."""
    if options:
        yield "not recommended, because they change the numbers; use them if you accept that:"
        for option in options:
            yield from (f"  {line}" for line in option.lines())
