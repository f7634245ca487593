"""Find options that change the numerics of training, and forecast the gain of each. A plan never recommends them.

The layouts of a plan train like a single process, up to the rounding of sums. These options change more, so only the
user can choose them. `params=bf16` rounds every weight before use. Compiled blocks fuse operations, which then round
less often.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.model_costs.model_profile import ZERO, ModelProfile
from paceline.planner.search.branch_and_bound import search, sort_key
from paceline.planner.search.search_space import SearchSpace

_PARAMS_EFFECT = "weights are gathered and used in bfloat16, but one process uses them in float32"
_COMPILE_EFFECT = "fused operations round less often, and the first step waits for the compiler"
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

    @property
    def command(self) -> str:
        """All options to type for the best layout."""
        typed = "".join(f" --{name} {value}" for name, value in self.estimate.settings.items())
        return f"--layout {self.estimate.layout}{typed}"

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
    return results


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
