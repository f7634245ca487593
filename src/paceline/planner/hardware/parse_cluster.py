"""Parse the cluster to plan for: `here`, `8xH100-80G`, `4x8xH100-80G@ib-ndr`, or a TOML file."""

import re
from dataclasses import replace
from pathlib import Path

from paceline.config.axis_counts import MAX_RANKS
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.planner.hardware.catalog import catalog_cluster, find_device, find_link
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.hardware.cluster_file import read_cluster_file

_EXAMPLE = "--cluster 4x8xH100-80G, 8xA100-80G@eth-100g, here, or a file cluster.toml"
_CLUSTER_TEXT = re.compile(r"(?:(\d+)[x×])?(?:(\d+)[x×])?([^@x×][^@]*)(?:@(.+))?", re.IGNORECASE)


def parse_cluster(text: str, *, local_cluster: Cluster | None = None) -> Cluster:
    """Return the cluster that `text` describes: NODESxDEVICESxNAME@LINK, the path of a TOML file, or `here`.

    LINK is the link between nodes. `local_cluster` is the result for `here`.

    Raises:
        UsageError, Problems: the device or link is unknown, a count is invalid, or the file has mistakes.
    """
    text = text.strip()
    if text == "here":
        if local_cluster is None:
            raise UsageError(
                "--cluster here: this machine was not measured.",
                cause="only the command `plan` measures the machine",
                hint="--cluster 4x8xH100-80G, or a file cluster.toml",
            )
        return local_cluster
    if text.endswith(".toml") or "/" in text:
        return read_cluster_file(Path(text))
    match = _CLUSTER_TEXT.fullmatch(text)
    if match is None:
        raise UsageError(f"--cluster {text!r} can't be read.", cause="it is not NODESxDEVICESxNAME@LINK", hint=_EXAMPLE)
    problems: list[PacelineError] = []
    counts = [_parse_count(text, digits, problems) for digits in match.groups()[:2] if digits]
    entry = find_device(match[3], problems=problems)
    between = replace(find_link(match[4], problems=problems), origin="given") if match[4] else None
    nodes, devices = ([1, *counts] if len(counts) < 2 else counts) if counts else (1, 1)
    if not problems and nodes * devices > MAX_RANKS:
        message = f"--cluster {text!r}: {nodes * devices:,} ranks, {MAX_RANKS:,} at most."
        problems.append(UsageError(message, cause="one digit too many", hint=_EXAMPLE))
    raise_all(problems)
    return catalog_cluster(entry, nodes=nodes, devices=devices, between=between)


def _parse_count(text: str, digits: str, problems: list[PacelineError]) -> int:
    if digits.strip("0") and len(digits) <= len(str(MAX_RANKS)):
        return int(digits)
    cause = "one digit too many" if digits.strip("0") else "at least one node with one device is needed"
    problems.append(UsageError(f"--cluster {text!r}: {digits} is not a valid count.", cause=cause, hint=_EXAMPLE))
    return 1
