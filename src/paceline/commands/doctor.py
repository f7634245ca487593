"""The `doctor` verb: checks this machine, or all nodes of a run and the links between them, before a training."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer

import msgspec

from paceline.commands.command_table import DoctorOptions, VerbOutput
from paceline.commands.common.option_checks import refuse_wait
from paceline.console.formatting import format_size, plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, UsageError, raise_all
from paceline.nodes.examination import Examination, examine_machine, examine_nodes, take_part
from paceline.nodes.head_connection import UNKNOWN_HOST_SECONDS
from paceline.nodes.machine_facts import MachineFacts, code_files, read_machine_facts
from paceline.nodes.node_meeting import Reception, listen_as_head
from paceline.nodes.node_place import NodePlace, has_late_names, node_place

_LOOPBACK = "127.0.0.1"
_MAX_LINKS = 12
_SLOW_SECONDS = 0.5


def run_verb(options: DoctorOptions, _: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    raise_all(refuse_wait(options.wait))
    start_time = time.monotonic()
    place = node_place(options.nodes, options.node, os.environ)
    if place is not None and place.is_extra_task:
        return 0, None, ""
    if place is None or place.num_nodes == 1:
        code = code_files(options.job)
        if code and not next(iter(code.values())).is_file():
            hint = "the path of the job, as seen from this folder"
            raise UsageError(f"{options.job} does not exist in {Path.cwd()}.", hint=hint)
        facts = _read_facts(options, code, head_host=_LOOPBACK)
        examination = examine_machine(facts, run_folder=Path(options.run_dir))
        return _result(examination, seconds=time.monotonic() - start_time)
    return _run_on_node(options, place, start_time=start_time)


def _run_on_node(options: DoctorOptions, place: NodePlace, *, start_time: float) -> VerbOutput:
    """Take part in the examination of several nodes, as the head or as a member."""
    run_folder = Path(options.run_dir)
    read_facts = partial(_read_facts, options, code_files(options.job), head_host=place.head_host)
    with _said_if_slow(f"looking up the address of {place.head_host}"):
        listener = listen_as_head(place)
    if listener is None:
        seconds_left = UNKNOWN_HOST_SECONDS - (time.monotonic() - start_time)  # a lookup may have taken some of them
        host_seconds = math.inf if has_late_names(os.environ) else max(0.0, seconds_left)
        end = take_part(
            place,
            read_facts=read_facts,
            run_folder=run_folder,
            wait_seconds=options.wait,
            host_seconds=host_seconds,
            report=_report,
        )
        text = f"node {end['node']}: {end['text']}; see the screen of node 0 ({place.head_host})"
        return end["exit_code"], end, text
    reception = Reception(listener, place, misfit_code=int(ExitCode.MACHINE))
    try:
        examination = examine_nodes(
            reception, read_facts(), run_folder=run_folder, wait_seconds=options.wait, report=_report
        )
    finally:
        reception.close()
    return _result(examination, head=place.head, seconds=time.monotonic() - start_time)


@contextmanager
def _said_if_slow(line: str) -> Iterator[None]:
    """Return a context that reports a line if it lasts longer than a moment."""
    timer = Timer(_SLOW_SECONDS, _report, args=(line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(line: str) -> None:
    print_line(line, sys.stderr)


def _read_facts(options: DoctorOptions, code: Mapping[str, Path], *, head_host: str) -> MachineFacts:
    data = {path: Path(path) for path in options.data}
    run_folder = Path(options.run_dir)
    return read_machine_facts(head_host=head_host, run_folder=run_folder, code=code, data=data, verb="paceline doctor")


def _result(examination: Examination, *, seconds: float, head: str = "") -> VerbOutput:
    value = {**_as_json(examination, seconds), "head": head}
    return examination.exit_code, value, _as_text(examination, seconds)


def _as_json(examination: Examination, seconds: float) -> dict[str, object]:
    links = [
        {"source": link.source, "target": link.target, **msgspec.to_builtins(link.result)} for link in examination.links
    ]
    return {
        "ok": not examination.problems,
        "nodes": {str(node): msgspec.to_builtins(facts) for node, facts in examination.facts.items()},
        "num_nodes": examination.num_nodes,
        "links": links,
        "findings": [msgspec.to_builtins(finding) for finding in examination.findings],
        "exclude": examination.excluded_hosts,
        "seconds": seconds,
    }


def _as_text(examination: Examination, seconds: float) -> str:
    is_alone = examination.num_nodes == 1
    lines = [_machine_line(node, facts, is_alone=is_alone) for node, facts in examination.facts.items()]
    lines += _link_lines(examination)
    for finding in sorted(examination.findings, key=lambda finding: finding.is_note):
        lines += [f"{'note ' if finding.is_note else 'WRONG'}  {finding.what}", f"       to do: {finding.hint}"]
    excluded = examination.excluded_hosts
    if excluded:
        lines.append(f"To leave {'it' if len(excluded) == 1 else 'them'} out: srun --exclude {','.join(excluded)}")
    what = "this machine" if is_alone else f"{len(examination.facts)} of {examination.num_nodes} nodes"
    num_problems = len(examination.problems)
    verdict = f"{plural(num_problems, 'problem')}; {what}" if num_problems else f"nothing is wrong with {what}"
    return "\n".join([*lines, f"{verdict}, checked in {seconds:.1f} s"])


def _machine_line(node: int, facts: MachineFacts, *, is_alone: bool) -> str:
    place = "" if is_alone else f" {facts.address} ({facts.interface or 'no interface'}),"
    gpu_text = f"{facts.gpus}, driver {facts.gpu_driver}" if facts.gpus else "no GPU"
    return (
        f"{'this machine' if is_alone else f'node {node}'}: {facts.host},{place} {plural(facts.cores, 'core')} "
        f"({facts.vector_unit}), {gpu_text}, Python {facts.python}, torch {facts.packages.get('torch', 'is missing')}, "
        f"{_free_text(facts.free_shared_memory)} free in /dev/shm, {_free_text(facts.free_disk)} on disk"
    )


def _free_text(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes >= 0 else "unknown"


def _link_lines(examination: Examination) -> list[str]:
    """Return a line for each link, the slowest first; of many links, only the slowest."""
    links = sorted(examination.links, key=lambda link: link.result.bytes_per_second)
    lines = [
        f"node {link.source} -> node {link.target}: "
        + (link.result.problem or f"{link.result.bytes_per_second / (1 << 20):,.0f} MiB/s, "
           f"{link.result.ping_seconds * 1e3:.2f} ms")
        for link in links[:_MAX_LINKS]
    ]  # fmt: skip
    num_hidden = len(links) - len(lines)
    return [*lines, *([f"{num_hidden} faster links"] if num_hidden else [])]
