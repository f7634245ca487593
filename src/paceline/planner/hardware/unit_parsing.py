"""Parse quantities with units: `80 GiB`, `400 Gbit/s`, `2 us`, `989 TFLOP/s`, `98.32 USD/h`."""

import re
from enum import StrEnum

from paceline.console.formatting import did_you_mean
from paceline.errors import UsageError

_QUANTITY = re.compile(r"\s*([+-]?[0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_MIN_VALUE, _MAX_VALUE = 1e-12, 1e24
_DECIMAL_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL_PREFIXES | _BINARY_PREFIXES).items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _DECIMAL_PREFIXES.items()}


class QuantityKind(StrEnum):
    """The kind of a quantity; the value names the kind in messages."""

    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes per second"
    SECONDS = "seconds"  # a short time, in seconds or less
    TIME = "time"  # a time of any length, also in minutes, hours or days
    FLOPS = "floating-point operations per second"
    WATTS = "watts"
    MONEY = "price per hour"


UNITS: dict[QuantityKind, dict[str, float]] = {
    QuantityKind.BYTES: _BYTES,
    QuantityKind.BYTES_PER_SECOND: {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()},
    QuantityKind.SECONDS: _SECONDS,
    QuantityKind.TIME: _SECONDS | {"min": 60.0, "h": 3600.0, "d": 86_400.0},
    QuantityKind.FLOPS: {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL_PREFIXES.items()},
    QuantityKind.WATTS: {"W": 1.0, "kW": 1e3},
    QuantityKind.MONEY: {"USD/h": 1.0, "EUR/h": 1.0, "GBP/h": 1.0, "CHF/h": 1.0},
}
"""The allowed units of each kind, with their value in the base unit."""
_EXAMPLES = {
    QuantityKind.BYTES: "80 GiB",
    QuantityKind.BYTES_PER_SECOND: "400 Gbit/s",
    QuantityKind.SECONDS: "2 us",
    QuantityKind.TIME: "50000 h",
    QuantityKind.FLOPS: "989 TFLOP/s",
    QuantityKind.WATTS: "700 W",
    QuantityKind.MONEY: "98.32 USD/h",
}


def parse_quantity(text: object, *, kind: QuantityKind, name: str, where: str = "", allow_zero: bool = False) -> float:
    """Return the quantity in its base unit; `allow_zero` permits 0.

    Base units are bytes, bytes per second, seconds, operations per second, watts, and money per hour.

    Raises:
        UsageError: the unit is missing, unknown or of another kind. Or the number is zero, negative, infinite or not
            plausible.
    """
    hint = f'{name} = "{_EXAMPLES[kind]}"'
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or not match[2]:
        problem = "has no unit" if match or isinstance(text, int | float) else "is not a number with a unit"
        raise UsageError(f"{name} = {text!r} {problem}.", where=where, cause=f"a value in {kind} is needed", hint=hint)
    factor = UNITS[kind].get(match[2])
    if factor is None:
        raise UsageError(
            f"{name} = {text!r}: {match[2]!r} is not a unit of {kind}.",
            where=where,
            cause=_unit_cause(match[2], kind),
            hint=hint,
        )
    if "," in match[1] and not _THOUSANDS.fullmatch(match[1]):
        cause = "use a comma between thousands and a point before decimals"
        raise UsageError(f"{name} = {text!r} is not a number.", where=where, cause=cause, hint=hint)
    value = float(match[1].replace(",", "").replace("_", "")) * factor
    if not (value > 0 or (allow_zero and value == 0)) or value == float("inf"):
        raise UsageError(f"{name} = {text!r} is not positive and finite.", where=where, hint=hint)
    if value and not _MIN_VALUE <= value <= _MAX_VALUE:
        cause = f"that is {value:g} {kind}: the unit or the exponent is wrong"
        raise UsageError(f"{name} = {text!r} is not plausible.", where=where, cause=cause, hint=hint)
    return value


def parse_currency(text: str) -> str:
    """Return the currency of a price: `USD` of `98.32 USD/h`."""
    match = _QUANTITY.fullmatch(text)
    assert match is not None
    return match[2].removesuffix("/h")


def _unit_cause(unit: str, expected_kind: QuantityKind) -> str:
    """Return why the unit is wrong: it is a unit of another kind, or it resembles a known unit."""
    other_kind = next((str(kind) for kind, units in UNITS.items() if unit in units), "")
    if other_kind:
        return f"that is a unit of {other_kind}"
    same_letters = next((known for known in UNITS[expected_kind] if known.lower() == unit.lower()), "")
    return f"did you mean {same_letters!r}?" if same_letters else did_you_mean(unit, UNITS[expected_kind])
