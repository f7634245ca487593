"""Parse the update rule, which decides how a batch becomes an update of the weights.

To add a rule, add a member to `UpdateKind` and a row to `RULE_SPECS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from typing_extensions import override

from paceline.console.formatting import closest_word, did_you_mean
from paceline.errors import LayoutError

UNBOUNDED = "none"  # the text for a staleness without a bound


class UpdateKind(StrEnum):
    """The update rules. `DOUBLE` is PipeDream-2BW, which keeps two versions of the weights."""

    SYNC = "sync"
    PIPEDREAM = "pipedream"
    DOUBLE = "2bw"
    HOGWILD = "hogwild"
    LOCAL = "local"
    DILOCO = "diloco"
    PS = "ps"


@dataclass(frozen=True)
class _Option:
    """An option of a rule: its allowed values in words, and its parser, which raises ValueError for any other."""

    allowed_values: str
    parse: Callable[[str], Any]


def _parse_integer(text: str, *, minimum: int, maximum: float = math.inf) -> int:
    if not minimum <= int(text) <= maximum:
        raise ValueError(text)
    return int(text)


def _parse_number(text: str, *, minimum: float, maximum: float) -> float:
    value = float(text)
    if not minimum <= value <= maximum:
        raise ValueError(text)
    return value


_POSITIVE_NUMBER = _Option(
    "a number above 0, at most 1,000,000", lambda text: _parse_number(text, minimum=math.ulp(0.0), maximum=1e6)
)
_FRACTION = _Option("a number from 0 to 1", lambda text: _parse_number(text, minimum=0.0, maximum=1.0))
_COUNT = _Option("an integer from 1", lambda text: _parse_integer(text, minimum=1))
_COUNT_OR_ZERO = _Option("an integer from 0", lambda text: _parse_integer(text, minimum=0))
_STALENESS_BOUND = _Option(
    f"an integer from 0, or {UNBOUNDED}",
    lambda text: math.inf if text == UNBOUNDED else _parse_integer(text, minimum=0),
)


@dataclass(frozen=True, kw_only=True)
class RuleSpec:
    """The properties of an update rule that a command needs before it imports torch.

    `options` take a value, `flags` take none, and `defaults` has the values of options that the user omits.
    `UpdateRule` explains the other fields.
    """

    options: Mapping[str, _Option] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "ddp"
    is_synchronous: bool = False
    has_cost_model: bool = False
    has_races: bool = False


_LOCAL = RuleSpec(options={"every": _COUNT}, defaults={"every": 8})
_DILOCO = RuleSpec(
    options={
        "every": _COUNT,
        "lr": _POSITIVE_NUMBER,
        "momentum": _Option(
            "a number from 0 to below 1", lambda text: _parse_number(text, minimum=0.0, maximum=1.0 - 1e-9)
        ),
        "fragments": _Option("an integer from 1 to 1,000", lambda text: _parse_integer(text, minimum=1, maximum=1_000)),
        "delay": _COUNT_OR_ZERO,
        "mix": _FRACTION,
    },
    defaults={"every": 500, "lr": 0.7, "momentum": 0.9, "mix": 0.5},
)
RULE_SPECS: Mapping[UpdateKind, RuleSpec] = {
    UpdateKind.SYNC: RuleSpec(is_synchronous=True, has_cost_model=True),
    UpdateKind.PIPEDREAM: RuleSpec(flags=("vertical",), layout="pp"),
    UpdateKind.DOUBLE: RuleSpec(layout="pp"),
    UpdateKind.HOGWILD: RuleSpec(has_races=True),
    UpdateKind.LOCAL: _LOCAL,
    UpdateKind.DILOCO: _DILOCO,
    UpdateKind.PS: RuleSpec(
        options={"servers": _COUNT, "staleness": _STALENESS_BOUND}, defaults={"servers": 1, "staleness": 4}
    ),
}


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """The requested update rule and its options."""

    kind: UpdateKind = UpdateKind.SYNC
    vertical: bool = False
    """PipeDream: whether every stage uses the weight version of the first stage."""
    every: int = field(default=1, metadata={"option": True})
    """Local SGD: sites synchronise after this many updates."""
    lr: float = field(default=1.0, metadata={"option": True})
    """Local SGD: the learning rate of the outer SGD, whose gradient is the mean of the sites' changes."""
    momentum: float = field(default=0.0, metadata={"option": True})
    """Local SGD: the Nesterov momentum of the outer SGD."""
    fragments: int = field(default=1, metadata={"option": True})
    """Local SGD: the number of fragments of the model, which are synchronised in turn."""
    delay: int = field(default=0, metadata={"option": True})
    """Local SGD: a site gets the new weights this many updates after it has sent its changes."""
    mix: float = field(default=0.0, metadata={"option": True})
    """Local SGD with a `delay`: a site trains on until it gets the new weights, and then mixes them with its own. `mix`
    is the fraction of its own weights."""
    servers: int = field(default=0, metadata={"option": True})
    """Parameter server: the number of ranks, the first ones, that hold the parameters."""
    staleness: float = field(default=0.0, metadata={"option": True})
    """Parameter server: how many updates old a worker's weights may be; infinity without a bound."""

    @property
    def is_synchronous(self) -> bool:
        """Return whether all ranks apply one update, of the whole batch, before the next batch begins."""
        return RULE_SPECS[self.kind].is_synchronous

    @property
    def has_cost_model(self) -> bool:
        """Return whether the planner can estimate the time and the memory of a step."""
        return RULE_SPECS[self.kind].has_cost_model

    @property
    def has_races(self) -> bool:
        """Return whether workers write to the same weights without synchronisation, so that no two runs are equal."""
        return RULE_SPECS[self.kind].has_races

    @property
    def layout(self) -> str:
        """The default layout for several ranks."""
        return RULE_SPECS[self.kind].layout

    @override
    def __str__(self) -> str:
        """Return the text that requests this rule: `every` and `staleness` always, others only if not the default."""
        spec = RULE_SPECS[self.kind]
        defaults = {f.name: f.default for f in fields(self)} | dict(spec.defaults)
        options = [
            f"{name}={_number_text(getattr(self, name))}"
            for name in spec.options
            if _is_written(name, getattr(self, name), defaults)
        ]
        return ",".join([str(self.kind), *(["vertical"] if self.vertical else []), *options])


def _is_written(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    return name in ("every", "staleness") or bool(value != defaults[name])


def _number_text(value: float) -> str:
    """Return text that parses to the same number."""
    if math.isinf(value):
        return UNBOUNDED
    return str(int(value)) if value == int(value) else repr(value)


def find_rule(name: str) -> UpdateKind | None:
    """Return the rule of this name, or the first one with an option of this name."""
    return next((kind for kind, spec in RULE_SPECS.items() if name in (kind, *spec.flags, *spec.options)), None)


def parse_update(text: str) -> UpdateRule:
    """Parse `sync`, `pipedream`, `pipedream,vertical`, `2bw`, `hogwild`, `local,every=8`, `diloco,every=500`, `ps`.

    Raises:
        LayoutError: the rule does not exist, or does not have such an option.
    """
    name, *options = (part.strip().lower() for part in text.split(","))
    if name not in set(UpdateKind):
        suggestion = closest_word(name, [*UpdateKind])
        cause = did_you_mean(name, [*UpdateKind]) or f"the rules: {', '.join(UpdateKind)}"
        raise LayoutError(
            f"{text!r} is not an update rule.", cause=cause, hint=f"--update {suggestion or UpdateKind.SYNC}"
        )
    kind = UpdateKind(name)
    return UpdateRule(kind=kind, **(dict(RULE_SPECS[kind].defaults) | _parse_rule_options(kind, options)))


def _parse_rule_options(kind: UpdateKind, options: Sequence[str]) -> dict[str, Any]:
    options_of_rule, flags = RULE_SPECS[kind].options, RULE_SPECS[kind].flags
    values: dict[str, Any] = {}
    for option in options:
        name, equals, value = (part.strip() for part in option.partition("="))
        if name in values:
            raise LayoutError(f"--update {kind} has {name} twice.", hint=f"--update {kind},{option}")
        if name in flags and not equals:
            values[name] = True
        elif name in options_of_rule:
            try:
                values[name] = options_of_rule[name].parse(value)
            except ValueError:
                example = RULE_SPECS[kind].defaults.get(name, 1)
                raise LayoutError(
                    f"--update {kind},{option}: {name} must be {options_of_rule[name].allowed_values}.",
                    hint=f"--update {kind},{name}={example}",
                ) from None
        else:
            raise _unknown_option_error(kind, name, option)
    return values


def _unknown_option_error(kind: UpdateKind, name: str, option: str) -> LayoutError:
    flags, options_of_rule = RULE_SPECS[kind].flags, RULE_SPECS[kind].options
    if name in flags:
        return LayoutError(f"--update {kind},{option}: {name} takes no value.", hint=f"--update {kind},{name}")
    suggestion = closest_word(name, [*flags, *options_of_rule])
    option_name = suggestion or next(iter([*options_of_rule, *flags]), "")
    example = (
        f"{option_name}={_example_value(kind, option_name, option if suggestion else '')}"
        if option_name in options_of_rule
        else option_name
    )
    hint = ",".join(filter(None, [str(kind), example]))
    option_list = ", ".join([*flags, *options_of_rule]) or "none"
    cause = f"did you mean {suggestion!r}?" if suggestion else f"its options: {option_list}"
    other_rule = find_rule(name)
    if other_rule not in (None, name):
        cause, hint = f"it is an option of {other_rule}; options of {kind}: {option_list}", f"{other_rule},{option}"
    return LayoutError(f"--update {kind} has no option {name!r}.", cause=cause, hint=f"--update {hint}")


def _example_value(kind: UpdateKind, name: str, option: str) -> str:
    """Return the value in the mistyped `option` if it is valid for the option `name`, else that option's default."""
    value = option.partition("=")[2].strip()
    try:
        RULE_SPECS[kind].options[name].parse(value)
    except ValueError:
        return str(RULE_SPECS[kind].defaults.get(name, 1))
    return value
