"""Formatting for people: numbers with their units, and suggestions for typing errors."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def closest_word(word: str, candidates: Iterable[str]) -> str:
    """Return the word that was probably meant, or an empty string."""
    return next((str(match) for match in get_close_matches(word, list(candidates), n=1, cutoff=0.6)), "")


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return `did you mean 'ddp'?`, or an empty string."""
    closest = closest_word(word, candidates)
    return f"did you mean {closest!r}?" if closest else ""


def shorten_line(line: str, *, max_length: int = 1000) -> str:
    """Return the line with its middle left out if it is very long."""
    if len(line) <= max_length:
        return line
    return f"{line[: max_length // 2]} ... ({len(line):,} characters) ... {line[-max_length // 4 :]}"


def plural(number: int, word: str) -> str:
    """Return a count with its noun: `1 step`, `2 steps`, `1,000 steps`, `2 processes`."""
    plural_word = f"{word}es" if word.endswith(("s", "ch")) else f"{word}s"
    return f"{number:,} {word if number == 1 else plural_word}"


def format_size(num_bytes: int) -> str:
    """Return a size in KiB, MiB or GiB."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def format_change(change: float, *, digits: int = 0) -> str:
    """Return a relative change: `+14%`, `-3%`; zero after rounding has no minus."""
    return f"{round(change, 2 + digits) + 0.0:+.{digits}%}"


def price_of_steps(price: float, currency: str) -> str:
    """Return the price of 1,000 steps, from the price of one step: `12.30 USD`, `0.0042 USD`."""
    total = 1000 * price
    return f"{total:,.2f} {currency}" if total >= 1 else f"{total:.2g} {currency}"


def format_duration(seconds: float) -> str:
    """Return a duration in milliseconds, or in seconds from one second on."""
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{seconds * 1e3:.0f} ms"


def format_precise_duration(seconds: float) -> str:
    """Return a duration with three digits or more: `345 ms`, `12.34 s`, `0.12 ms`."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def long_duration(seconds: float) -> str:
    """Return a duration in a suitable unit: `12.5 s`, `34.9 min`, `3.1 h`, `50,000 h`."""
    for unit, unit_seconds in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_seconds:
            return (
                f"{seconds / unit_seconds:,.0f} {unit}"
                if seconds >= 100 * unit_seconds
                else f"{seconds / unit_seconds:.1f} {unit}"
            )
    return format_duration(seconds)


def first_names(names: Sequence[str], *, max_names: int = 3) -> str:
    """Return a few names, and how many more there are."""
    more_text = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more_text


def format_metric(value: float, *, decimals: int = 4) -> str:
    """Format a loss or a metric with this many decimals, or as a power of ten if that would hide its digits."""
    is_small = 0.0 < abs(value) < 10.0 ** (1 - decimals)
    return f"{value:.1e}" if is_small else f"{value:.{decimals}f}"


def join_words(words: Sequence[str]) -> str:
    """Return the words as a list in a sentence, such as "a, b and c"."""
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), *words[-1:]])
