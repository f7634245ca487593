"""Read the link between machines that `--link` gives: a rate, a name of the catalogue, or what `doctor` measured."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.config.text_file import read_user_text
from paceline.errors import MachineError, UsageError
from paceline.planner.hardware.catalog import LINKS
from paceline.planner.hardware.cluster import Link
from paceline.planner.hardware.unit_parsing import QuantityKind, parse_quantity

EXAMPLE = (
    "--link 20Mbit/s, --link 1.5GB/s, --link eth-10g, or --link doctor.json after "
    "`paceline doctor --nodes N:HOST --json > doctor.json` on node 0 (on the others the same line)"
)
_ASSUMED_LATENCY_SECONDS = 50e-6
_OTHER_RATE = re.compile(
    r"(?P<number>[+-]?[0-9][0-9_,.]*)\s*(?P<prefix>[kKmMgGtT]i?|)(?P<unit>(?i:bits?(/s|/sec|ps)?|bps|b/s|b|))"
)
_FILE_EXAMPLE = "on node 0: paceline doctor --nodes 2:HOST --json > links.json, and on the others the same line"


class _TestedLink(msgspec.Struct, frozen=True):
    """A link in the output of `doctor --json`."""

    source: int
    target: int
    ping_seconds: float
    bytes_per_second: float
    problem: str


class _DoctorOutput(msgspec.Struct, frozen=True):
    """The part of the output of `doctor --json` that is read."""

    links: list[_TestedLink]
    num_nodes: int = 0
    head: str = ""


@dataclass(frozen=True, kw_only=True)
class GivenLink:
    """The link of `--link`, and what its file says about the nodes: how many there are, and where they meet."""

    link: Link
    num_nodes: int | None = None
    head: str = ""
    """The part of `--nodes` after the number, such as "host1"; empty if it is unknown."""


def read_given_link(text: str) -> GivenLink:
    """Return the link between two machines, which all ranks of a machine share if it has a rate or was measured.

    `text` is a rate such as `20Mbit/s`, a name of the catalogue such as `eth-10g`, or the file that
    `paceline doctor --json` wrote. Of a file, the slowest link counts.

    Raises:
        UsageError: the text is none of these, or the file can't be read.
        MachineError: by the file, a link between two nodes does not work.
    """
    text = text.strip()
    if (known := LINKS.get(text.lower())) is not None:
        return GivenLink(link=replace(known, origin="given"))
    if re.match(r"[+-]?[0-9]", text) and not Path(text).is_file():
        text = _with_usual_unit(text)
        try:
            rate = parse_quantity(text, kind=QuantityKind.BYTES_PER_SECOND, name="--link")
        except UsageError as error:
            raise UsageError(error.what, cause=error.cause, hint=EXAMPLE) from None
        source = "--link; the latency is assumed"
        link = Link(
            name="network", latency_seconds=_ASSUMED_LATENCY_SECONDS, bytes_per_second=rate, is_shared=True,
            source=source, origin="given",
        )  # fmt: skip
        return GivenLink(link=link)
    return _read_doctor_file(Path(text))


def _with_usual_unit(text: str) -> str:
    """Return a rate with the unit as Paceline spells it: `20Mbit/s` for `20mbit` and `20Mbps`, `20MB/s` for `20MBps`.

    Raises:
        UsageError: the unit may mean bits or bytes.
    """
    match = _OTHER_RATE.fullmatch(text)
    if match is None or not match["prefix"] + match["unit"]:
        return text
    number, prefix, unit = match["number"], match["prefix"], match["unit"]
    prefix = "k" if prefix.lower() == "k" else prefix[:1].upper() + prefix[1:].lower()
    is_usual = match["prefix"] in "kMGT"  # `mbps` is megabytes for tc, and megabits for many people
    is_bits = unit.lower().startswith("bit") or (unit in ("bps", "b/s", "b") and is_usual)
    if is_bits and len(prefix) < 2:
        return f"{number}{prefix}bit/s"
    if unit in ("Bps", "B/s"):
        return f"{number}{prefix}B/s" if match["prefix"] != "m" else text
    short = prefix[:1]
    if unit == "B":
        return text
    meant = f"did you mean '{number}{short}bit/s', or '{number}{short}B/s'?"
    raise UsageError(f"--link {text}: the unit may mean bits or bytes.", cause=meant, hint=EXAMPLE)


def _read_doctor_file(path: Path) -> GivenLink:
    """Return the slowest link of a file that `doctor --json` wrote, with the longest latency of all links."""
    try:
        content: Any = read_user_text(path, expected="the output of `paceline doctor --json`", hint=_FILE_EXAMPLE)
    except FileNotFoundError:
        cause = f"it is no rate with a unit, no file, and none of {', '.join(LINKS)}"
        raise UsageError(f"--link {path} can't be read.", cause=cause, hint=EXAMPLE) from None
    try:
        output = msgspec.json.decode(content, type=_DoctorOutput)
    except msgspec.DecodeError as error:
        what = f"--link {path} is not the output of `paceline doctor --json`: {error}."
        raise UsageError(what, where=str(path), hint=_FILE_EXAMPLE) from None
    links = output.links
    if not links:
        cause = "it is the output for a single machine, or for a node other than node 0"
        raise UsageError(f"--link {path} has no links.", where=str(path), cause=cause, hint=_FILE_EXAMPLE)
    for link in links:
        if link.problem or not link.bytes_per_second > 0:
            what = f"--link {path}: the link node {link.source} -> node {link.target} does not work: {link.problem}."
            raise MachineError(what, where=str(path), hint="paceline doctor --nodes N:HOST says what to do")
    slowest = min(links, key=lambda link: link.bytes_per_second)
    measured = Link(
        name=f"node {slowest.source} -> node {slowest.target}",
        latency_seconds=max(link.ping_seconds for link in links) / 2,  # a ping goes there and back
        bytes_per_second=slowest.bytes_per_second,
        is_shared=True,
        source=str(path),
        origin="measured",
    )
    return GivenLink(link=measured, num_nodes=output.num_nodes or None, head=output.head)
