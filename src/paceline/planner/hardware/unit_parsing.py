"""Parser of quantities with units: `80 GiB`, `400 Gbit/s`, `2 us`, `989 TFLOP/s`, `98.32 USD/h`."""

import re
from enum import StrEnum

from paceline.console.formatting import did_you_mean
from paceline.errors import UsageError

_WRITTEN = re.compile(r"\s*([+-]?[0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_LEAST, _MOST = 1e-12, 1e24
_STEPS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_POWERS = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{step}B": size for step, size in (_STEPS | _POWERS).items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BITS = {f"{step}bit": size / 8 for step, size in _STEPS.items()}


class QuantityKind(StrEnum):
    """The kind of a quantity, with its unit in words."""

    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes per second"
    SECONDS = "seconds"
    TIME = "time"
    FLOPS = "floating-point operations per second"
    WATTS = "watts"
    MONEY = "price per hour"


UNITS: dict[QuantityKind, dict[str, float]] = {
    QuantityKind.BYTES: _BYTES,
    QuantityKind.BYTES_PER_SECOND: {f"{unit}/s": size for unit, size in (_BYTES | _BITS).items()},
    QuantityKind.SECONDS: _SECONDS,
    QuantityKind.TIME: _SECONDS | {"min": 60.0, "h": 3600.0, "d": 86_400.0},
    QuantityKind.FLOPS: {f"{step}FLOP/s": size for step, size in _STEPS.items()},
    QuantityKind.WATTS: {"W": 1.0, "kW": 1e3},
    QuantityKind.MONEY: {"USD/h": 1.0, "EUR/h": 1.0, "GBP/h": 1.0, "CHF/h": 1.0},
}
_EXAMPLES = {
    QuantityKind.BYTES: "80 GiB",
    QuantityKind.BYTES_PER_SECOND: "400 Gbit/s",
    QuantityKind.SECONDS: "2 us",
    QuantityKind.TIME: "50000 h",
    QuantityKind.FLOPS: "989 TFLOP/s",
    QuantityKind.WATTS: "700 W",
    QuantityKind.MONEY: "98.32 USD/h",
}


def read_quantity(text: object, *, measures: QuantityKind, name: str, where: str = "", or_zero: bool = False) -> float:
    """Return the quantity in its base unit; `or_zero` permits 0.

    Base units are bytes, bytes per second, seconds, operations per second, watts, and money per hour.

    Raises:
        UsageError: the unit is missing, unknown or of another kind, or the number is not positive or implausible.
    """
    hint = f'{name} = "{_EXAMPLES[measures]}"'
    written = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
    if written is None or not written[2]:
        said = "has no unit" if written or isinstance(text, int | float) else "is not a number with a unit"
        raise UsageError(f"{name} = {text!r} {said}.", where=where, cause=f"it is in {measures}", hint=hint)
    size = UNITS[measures].get(written[2])
    if size is None:
        raise UsageError(
            f"{name} = {text!r}: {written[2]!r} is not a unit of {measures}.",
            where=where,
            cause=_meant(written[2], measures),
            hint=hint,
        )
    if "," in written[1] and not _THOUSANDS.fullmatch(written[1]):
        cause = "use a comma between thousands and a point before decimals"
        raise UsageError(f"{name} = {text!r} is not a number.", where=where, cause=cause, hint=hint)
    value = float(written[1].replace(",", "").replace("_", "")) * size
    if not (value > 0 or (or_zero and value == 0)) or value == float("inf"):
        raise UsageError(f"{name} = {text!r} is not positive.", where=where, hint=hint)
    if value and not _LEAST <= value <= _MOST:
        cause = f"it is {value:g} {measures}: a wrong unit, or an exponent"
        raise UsageError(f"{name} = {text!r} is not plausible.", where=where, cause=cause, hint=hint)
    return value


def currency_of(text: str) -> str:
    """Return the currency of a price: `USD` of `98.32 USD/h`."""
    written = _WRITTEN.fullmatch(text)
    assert written is not None
    return written[2].removesuffix("/h")


def _meant(unit: str, measures: QuantityKind) -> str:
    other = next((str(kind) for kind, units in UNITS.items() if unit in units), "")
    if other:
        return f"that is a unit of {other}"
    same = next((known for known in UNITS[measures] if known.lower() == unit.lower()), "")
    return f"did you mean {same!r}?" if same else did_you_mean(unit, UNITS[measures])
