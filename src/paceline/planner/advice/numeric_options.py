"""Options that change the numerics of training, with the gain of each: shown in a plan, never recommended.

The layouts of a plan train as one process does, up to the rounding of sums. These options change more, so only the user
can choose them: `params=bf16` rounds every weight before use, and compiled blocks fuse operations, with fewer roundings
between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.model_costs.model_profile import NOTHING, ModelProfile
from paceline.planner.search.branch_and_bound import key_of, search
from paceline.planner.search.search_space import SearchSpace

_PARAMS = "weights are gathered and used in bfloat16, but one process uses them in float32"
_COMPILE = "fused operations round less often, and the first step waits for the compiler"
_SMALL = 0.005
_WHOLE = "a compiled block is recomputed as a whole"
_NO_TP = "torch.compile does not support tensors that tp shards over the ranks"


@dataclass(frozen=True, kw_only=True)
class NumericsOption:
    """The best layout with one option, named `words`, and how the option changes the numerics.

    `seconds` is the forecast step time of the recommended layout without it.
    """

    words: str
    changes: str
    estimate: Estimate
    seconds: float

    @property
    def command(self) -> str:
        """The options to type."""
        typed = "".join(f" --{name} {value}" for name, value in self.estimate.settings.items())
        return f"--layout {self.estimate.layout}{typed}"

    def as_json(self) -> dict[str, Any]:
        """Return the values by name; `recommended_step_seconds` is the forecast of the recommended layout."""
        found = self.estimate
        return {
            "option": self.words,
            "changes": self.changes,
            "layout": found.layout,
            "settings": found.settings,
            "peak_bytes": round(found.peak_bytes),
            "step_seconds": found.step_seconds,
            "recommended_step_seconds": self.seconds,
            "tokens_per_second_per_device": found.tokens_per_second_per_device,
            "samples_per_second_per_device": found.samples_per_second_per_device,
            "mfu": found.mfu,
        }

    def lines(self) -> Iterator[str]:
        """Yield two lines of text."""
        found, ratio = self.estimate, self.seconds / self.estimate.step_seconds
        speed = f"{ratio:.2f} times as fast as" if ratio >= 1 else f"{1 / ratio:.2f} times as long as"
        speed = speed if abs(ratio - 1) >= _SMALL else "as fast as"
        peak, seconds = format_size(round(found.peak_bytes)), format_precise_duration(found.step_seconds)
        held = f"{peak}, {seconds} per step, MFU {found.mfu:.1%}"
        yield f"with {self.words}: {self.command}"
        yield f"  {held} (forecast): {speed} the recommended one; {self.changes}"


def with_compiled_blocks(facts: ModelProfile) -> ModelProfile:
    """Return the profile of the same model with its blocks compiled."""
    refused = {**facts.refused, "tp": facts.refused.get("tp", _NO_TP), "remat=selective": _WHOLE}
    return replace(facts, compiles=True, refused=refused)


def numerics_options(forecast: CostModel, recommended: Estimate, grid: SearchSpace) -> list[NumericsOption]:
    """Return the best layout that fits with each option that the model, the devices and the settings leave open."""
    facts, device = forecast.facts, forecast.fleet.device
    seconds = forecast.seconds(recommended.candidate).step_seconds
    found = list[NumericsOption]()
    if device.rate("bf16") >= device.rate(facts.precision):
        tried = search(forecast, grid=replace(grid, zero=(3,), params=("bf16",))).best.values()
        options = [one for one in tried if one.candidate.params == "bf16"]
        found += _best("params=bf16", _PARAMS, options, seconds)
    if not facts.compiles and any(part.fused_bytes != NOTHING for part in facts.blocks or (facts.first,)):
        tried = search(forecast.of(with_compiled_blocks(facts)), grid=grid).best.values()
        found += _best("--train.compile true", _COMPILE, list(tried), seconds)
    return found


def _best(words: str, changes: str, options: Sequence[Estimate], seconds: float) -> Iterator[NumericsOption]:
    if options:
        yield NumericsOption(words=words, changes=changes, estimate=min(options, key=key_of), seconds=seconds)


def option_lines(options: Sequence[NumericsOption]) -> Iterator[str]:
    """Yield a title and the options, or nothing."""
    if options:
        yield "not recommended, because they change the numbers; use them if you accept that:"
        for option in options:
            yield from (f"  {line}" for line in option.lines())
