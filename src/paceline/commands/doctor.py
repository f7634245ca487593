"""The `doctor` verb: checks this machine, or all nodes of a run and the links between them, before a training."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.commands.command_table import DoctorOptions, VerbOutput
from paceline.console.formatting import first_names, format_size, plural
from paceline.console.output import print_line
from paceline.errors import UsageError
from paceline.nodes.examination import Examination, examine_machine, examine_nodes, take_part
from paceline.nodes.machine_facts import MachineFacts, read_machine_facts
from paceline.nodes.node_meeting import listen_as_head
from paceline.nodes.node_place import NodePlace, node_place

_LOOPBACK = "127.0.0.1"
_MAX_CODE_FILES, _MAX_LINKS = 200, 12


def doctor(job: str | None = None, *, run_dir: str | Path = "runs", data: Sequence[str | Path] = ()) -> Examination:
    """Check this machine, and return what was found.

    `job` names the code that is compared between nodes, and `data` the data folders.

    Raises:
        UsageError: the job's file does not exist.
    """
    return examine_machine(_read_facts(job, run_dir=Path(run_dir), data=data, head_host=_LOOPBACK))


def run_verb(options: DoctorOptions, _: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    start_time = time.monotonic()
    place = node_place(options.nodes, options.node, os.environ)
    if place is not None and place.is_extra_task:
        return 0, None, ""
    if place is None or place.num_nodes == 1:
        examination = doctor(options.job, run_dir=options.run_dir, data=options.data)
        return _result(examination, seconds=time.monotonic() - start_time)
    return _run_on_node(options, place, start_time=start_time)


def _run_on_node(options: DoctorOptions, place: NodePlace, *, start_time: float) -> VerbOutput:
    """Take part in the examination of several nodes, as the head or as a member."""
    run_folder = Path(options.run_dir)
    listener = listen_as_head(place)
    facts = _read_facts(options.job, run_dir=run_folder, data=options.data, head_host=place.head_host)
    if listener is None:
        exit_code, text = take_part(place, facts, run_folder=run_folder, wait_seconds=options.wait)
        value = {"node": place.node, "exit_code": exit_code, "text": text}
        return exit_code, value, f"{facts.host}: {text}; see the screen of {place.head_host}"
    report: Callable[[str], None] = lambda line: print_line(line, sys.stderr)  # noqa: E731
    examination = examine_nodes(listener, place, facts, run_folder=run_folder, wait_seconds=options.wait, report=report)
    return _result(examination, seconds=time.monotonic() - start_time)


def _read_facts(job: str | None, *, run_dir: Path, data: Sequence[str | Path], head_host: str) -> MachineFacts:
    return read_machine_facts(
        head_host=head_host,
        run_folder=run_dir,
        code=_code_files(job),
        data={str(path): Path(path) for path in data},
    )


def _code_files(job: str | None) -> Mapping[str, Path]:
    """Return the job's file and the other Python files of its folder, by name; none for a module's name.

    Raises:
        UsageError: the file does not exist.
    """
    path = Path((job or "").partition(":")[0])
    if path.suffix != ".py":
        return {}
    if not path.is_file():
        raise UsageError(f"{path} does not exist in {Path.cwd()}.", hint="the path of the job, the same on every node")
    others = sorted(path.parent.glob("*.py"))[:_MAX_CODE_FILES]
    return {file.name: file for file in [path, *others]}


def _result(examination: Examination, *, seconds: float) -> VerbOutput:
    return examination.exit_code, _as_json(examination, seconds), _as_text(examination, seconds)


def _as_json(examination: Examination, seconds: float) -> dict[str, object]:
    links = [
        {"source": link.source, "target": link.target, **msgspec.to_builtins(link.result)} for link in examination.links
    ]
    return {
        "ok": not examination.findings,
        "nodes": {str(node): msgspec.to_builtins(facts) for node, facts in examination.facts.items()},
        "num_nodes": examination.num_nodes,
        "links": links,
        "findings": [msgspec.to_builtins(finding) for finding in examination.findings],
        "exclude": _hosts_to_exclude(examination),
        "seconds": seconds,
    }


def _as_text(examination: Examination, seconds: float) -> str:
    is_alone = examination.num_nodes == 1
    lines = [_machine_line(node, facts, is_alone=is_alone) for node, facts in examination.facts.items()]
    lines += _link_lines(examination)
    for finding in examination.findings:
        lines += [f"WRONG  {finding.what}", f"       to do: {finding.hint}"]
    excluded = _hosts_to_exclude(examination)
    if excluded and not is_alone:
        lines.append(f"To leave {'it' if len(excluded) == 1 else 'them'} out: srun --exclude {','.join(excluded)}")
    what = "this machine" if is_alone else f"{len(examination.facts)} of {examination.num_nodes} nodes"
    num_findings = len(examination.findings)
    verdict = f"{plural(num_findings, 'problem')}; {what}" if num_findings else f"nothing is wrong with {what}"
    return "\n".join([*lines, f"{verdict}, checked in {seconds:.1f} s"])


def _machine_line(node: int, facts: MachineFacts, *, is_alone: bool) -> str:
    place = "" if is_alone else f" {facts.address} ({facts.interface or 'no interface'}),"
    gpus = first_names(sorted(set(facts.gpus)), max_names=2)
    gpu_text = f"{len(facts.gpus)} x {gpus}, driver {facts.gpu_driver}" if facts.gpus else "no GPU"
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


def _hosts_to_exclude(examination: Examination) -> list[str]:
    """Return the hosts that a finding blames, unless it blames node 0 alone or most of the nodes."""
    blamed = {node for finding in examination.findings for node in finding.nodes if node in examination.facts}
    hosts = [examination.facts[node].host for node in sorted(blamed)]
    return hosts if 0 < 2 * len(hosts) <= examination.num_nodes + 1 < 2 * examination.num_nodes + 1 else []
