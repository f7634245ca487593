"""Judgement of the facts of machines: what each one lacks, and what differs between them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from paceline.console.formatting import first_names, format_size
from paceline.errors import ExitCode
from paceline.nodes.finding import Finding, distinct_hosts, format_nodes
from paceline.nodes.machine_facts import MISSING, UNREADABLE, MachineFacts

Facts = Mapping[int, MachineFacts]
"""The facts of each node, by its number."""
MIN_SHARED_MEMORY, MIN_DISK, MIN_OPEN_FILES = 64 << 20, 1 << 30, 1024
_MAX_SKEW_SECONDS = 1.0
_MAX_NAMES = 4
_UNSET = "unset"
_KERNELS = {"MKL_CBWR", "ATEN_CPU_CAPABILITY"}  # with which the user chooses the kernels of all nodes
_COMPUTING_PACKAGES = ("torch", "paceline", "numpy", "triton", "transformers", "safetensors", "msgspec")
_COMPUTING_PREFIXES = ("nvidia-", "torch")


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """A kind of fact that should be equal on all nodes."""

    read: Callable[[MachineFacts], Mapping[str, Any]]
    """Return the values of a machine by their names, the most important first."""
    hint: str
    is_of_machine: bool = False
    """Whether the machine itself differs, and not what the user installed or set there."""
    is_note: bool = False
    changes_training: bool = False
    """Whether nodes that differ can't train together, or would train something else."""
    absent: str = _UNSET
    """The value of a name that a machine lacks."""


def _is_computing(package: str) -> bool:
    return package in _COMPUTING_PACKAGES or package.startswith(_COMPUTING_PREFIXES)


def _computing_packages(facts: MachineFacts) -> dict[str, str]:
    versions = {name: version for name, version in facts.packages.items() if _is_computing(name)}
    named = {name: versions[name] for name in _COMPUTING_PACKAGES if name in versions}
    return {"python": facts.python, **named, **versions}


_SAME_IMAGE, _SAME_COMMIT = "the same image, or the same lock file, on every node", "the same commit on every node"
_VERBS = _Comparison(
    read=lambda facts: {"command": facts.verb}, hint="the same command on every node", changes_training=True
)
_COMPARISONS = (
    _Comparison(read=lambda facts: facts.command, hint="the same command on every node", changes_training=True),
    _Comparison(read=_computing_packages, hint=_SAME_IMAGE, changes_training=True),
    _Comparison(
        read=lambda facts: {name: version for name, version in facts.packages.items() if not _is_computing(name)},
        hint=_SAME_IMAGE,
        is_note=True,
    ),
    _Comparison(
        read=lambda facts: {**dict(list(facts.code.items())[:1]), **facts.imported},
        hint=_SAME_COMMIT,
        changes_training=True,
        absent=MISSING,
    ),
    _Comparison(
        read=lambda facts: {name: facts.code[name] for name in list(facts.code)[1:] if name not in facts.imported},
        hint=_SAME_COMMIT,
        is_note=True,
        absent=MISSING,
    ),
    _Comparison(read=lambda facts: facts.data, hint="the same data on every node", changes_training=True),
    _Comparison(
        read=lambda facts: facts.variables, hint="the same value on every node, or none", changes_training=True
    ),
    _Comparison(
        read=lambda facts: {} if facts.variables.keys() >= _KERNELS else {"vector unit": facts.vector_unit},
        hint="for equal bits: nodes of one kind, or export MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 on every node",
        is_of_machine=True,
        is_note=True,
    ),
    _Comparison(read=lambda facts: {"GPUs": facts.gpus or "none"}, hint="nodes of one kind", is_of_machine=True),
    _Comparison(
        read=lambda facts: {"GPU driver": facts.gpu_driver} if facts.gpus else {},
        hint="the same driver on every node",
        is_of_machine=True,
    ),
    _Comparison(
        read=lambda facts: {"MTU": facts.mtu} if facts.mtu else {},
        hint="ip link set DEVICE mtu BYTES: the smallest of them, on every node",
        is_of_machine=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """A problem of one machine. Problems of one `kind` with the same words and the same hint are one finding.

    If the words contain an amount, whose `badness` says how bad it is, they are those of the worst machine.
    """

    kind: str
    what: str
    hint: str
    badness: float | None = None
    is_note: bool = False
    prevents_training: bool = False


def judge_facts(facts: Facts, *, skews: Mapping[int, float] | None = None) -> list[Finding]:
    """Return what is wrong with the machines, one finding for each cause.

    `skews` has the seconds by which each node's clock is ahead of the head's.
    """
    with_verbs = {node: machine for node, machine in facts.items() if machine.verb}
    found = _differences(with_verbs, _VERBS)  # then everything else differs, too
    found = found or [finding for comparison in _COMPARISONS for finding in _differences(facts, comparison)]
    ahead = {node: (skews or {}).get(node, 0.0) for node in facts}
    usual = median_low(ahead.values())
    hosts = distinct_hosts(
        {node: machine.host for node, machine in facts.items()},
        {node: machine.address for node, machine in facts.items()},
    )
    groups: dict[tuple[str, str, str], dict[int, _Problem]] = {}  # by kind, words and hint
    for node, machine in facts.items():
        for problem in _problems_of_machine(machine, skew=ahead[node] - usual, is_alone=len(facts) == 1):
            words = problem.what if problem.badness is None else ""
            groups.setdefault((problem.kind, words, "" if problem.is_note else problem.hint), {})[node] = problem
    for (kind, _, _), problems in groups.items():
        nodes = list(problems)
        name = "this machine" if len(facts) == 1 else format_nodes(nodes)
        host = f" ({hosts[nodes[0]]})" if len(nodes) == 1 else ""
        worst = max(problems.values(), key=lambda problem: problem.badness or 0.0)
        at_worst = "at worst, " if len({problem.what for problem in problems.values()}) > 1 else ""
        what = f"{name}{host}: {at_worst}{worst.what}"
        code = int(ExitCode.MACHINE) if worst.prevents_training else 0
        found.append(
            Finding(
                what=what,
                hint=_joint_hint(problems),
                nodes=tuple(nodes),
                is_note=worst.is_note,
                refusal_code=code,
                kind=kind,
            )
        )
    return found


def _joint_hint(problems: Mapping[int, _Problem]) -> str:
    """Return the hint of problems of one kind; if it depends on the node, each with its nodes."""
    nodes_by_hint: dict[str, list[int]] = {}
    for node, problem in problems.items():
        nodes_by_hint.setdefault(problem.hint, []).append(node)
    if len(nodes_by_hint) == 1:
        return next(iter(nodes_by_hint))
    return "; ".join(f"on {format_nodes(nodes)}: {hint}" for hint, nodes in nodes_by_hint.items())


def _differences(facts: Facts, comparison: _Comparison) -> list[Finding]:
    """Return one finding for all names whose values differ between the same nodes, for example for all packages."""
    values = {node: comparison.read(machine) for node, machine in facts.items()}
    if comparison.is_of_machine:  # a machine without a GPU has no driver that could differ
        values = {node: own for node, own in values.items() if own}
    names_by_nodes: dict[tuple[int, ...], list[str]] = {}
    for name in dict.fromkeys(name for own in values.values() for name in own):
        by_node = {node: own.get(name, comparison.absent) for node, own in values.items()}
        if len(set(by_node.values())) > 1:
            names_by_nodes.setdefault(_minority(by_node), []).append(name)
    return [
        Finding(
            what=_difference_text(names, values, absent=comparison.absent),
            hint=comparison.hint,
            nodes=nodes if comparison.is_of_machine else (),
            is_note=comparison.is_note,
            refusal_code=int(ExitCode.REFUSED) if comparison.changes_training else 0,
        )
        for nodes, names in names_by_nodes.items()
    ]


def _minority(by_node: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the nodes whose value differs from that of most nodes; none if there is no majority."""
    value, count = Counter(by_node.values()).most_common(1)[0]
    return tuple(node for node, own in by_node.items() if own != value) if 2 * count > len(by_node) else ()


def _difference_text(names: Sequence[str], values: Mapping[int, Mapping[str, Any]], *, absent: str) -> str:
    nodes_by_value: dict[Any, list[int]] = {}
    for node, own in values.items():
        nodes_by_value.setdefault(own.get(names[0], absent), []).append(node)
    parts = [f"{value} on {format_nodes(nodes)}" for value, nodes in nodes_by_value.items()]
    others = f"; so {'do' if len(names) > 2 else 'does'} {first_names(names[1:], max_names=_MAX_NAMES)}"
    return f"{names[0]} differs: {', '.join(parts)}{others if len(names) > 1 else ''}"


def _problems_of_machine(facts: MachineFacts, *, skew: float, is_alone: bool) -> list[_Problem]:
    problems = [] if is_alone else _problems_of_name(facts)
    for variable, value in facts.interface_variables.items():
        problem = _interface_problem(variable, value, facts, is_alone=is_alone)
        if problem:
            hint = f"export {variable}={facts.interface or 'INTERFACE'}"
            what = f"{variable}={value}, but {problem}"
            problems.append(_Problem(kind=variable, what=what, hint=hint, prevents_training=True))
    if abs(skew) > _MAX_SKEW_SECONDS:
        what = f"the clock is {skew:+.1f} s off that of the other nodes, so times in their logs can't be compared"
        hint = "chronyc makestep (in a container: on the machine below it)"
        problems.append(_Problem(kind="clock", what=what, hint=hint, badness=abs(skew)))
    return [*problems, *_problems_of_files(facts), *_problems_of_resources(facts)]


def _problems_of_files(facts: MachineFacts) -> list[_Problem]:
    """Return which of the files and folders that the user named are not there."""
    named = [*list(facts.code.items())[:1], *facts.data.items()]
    return [
        _Problem(
            kind=name,
            what=f"{name} is missing" if digest == MISSING else f"{name} {digest}",
            hint="the path, as seen from the folder of the command" if digest == MISSING else "its owner and its mount",
            prevents_training=True,
        )
        for name, digest in named
        if digest == MISSING or digest.startswith(UNREADABLE)
    ]


def _problems_of_name(facts: MachineFacts) -> list[_Problem]:
    """Return what makes gloo listen at an address that no other node reaches.

    Paceline's own ranks then use the interface that leads to rank 0, so this is a note if there is one.
    """
    if "GLOO_SOCKET_IFNAME" in facts.interface_variables or facts.address.startswith("127."):
        return []
    what = ""
    if not facts.host_address:
        what = "its own name resolves to nothing"
    elif facts.host_address.startswith("127.") or not facts.is_host_address_own:
        kind = "" if facts.host_address.startswith("127.") else ", which is no address of it"
        what = f"its own name resolves to {facts.host_address}{kind}"
    if not what:
        return []
    what += "; gloo would listen where no other node reaches it"
    hint = f"export GLOO_SOCKET_IFNAME={facts.interface or 'INTERFACE'} (paceline train does it by itself)"
    return [_Problem(kind="name", what=what, hint=hint, is_note=bool(facts.interface))]


def _interface_problem(variable: str, value: str, facts: MachineFacts, *, is_alone: bool) -> str:
    """Return what is wrong with a variable that names interfaces; empty if nothing is.

    gloo takes names. NCCL takes prefixes of names, `=` before an exact name, and `^` before those to leave out. A
    cluster may have another network for the ranks than the one on which the nodes meet.
    """
    if variable.startswith("GLOO") and value[0] in "^=":
        return f"gloo takes only names, and {value[0]} is NCCL's spelling"
    if value.startswith("^") or not facts.interfaces:
        return ""
    asked = value.removeprefix("=").split(",")
    is_exact = variable.startswith("GLOO") or value.startswith("=")
    matching = [
        interface
        for interface in facts.interfaces
        if (interface.name in asked if is_exact else interface.name.startswith(tuple(asked)))
    ]
    missing = [name for name in asked if is_exact and name not in [interface.name for interface in facts.interfaces]]
    if not matching or (missing and variable.startswith("GLOO")):
        return f"there is only {', '.join(interface.name for interface in facts.interfaces)}"
    is_only_loopback = all(interface.is_loopback for interface in matching)
    if is_only_loopback and not is_alone and not facts.address.startswith("127."):
        return "no other node reaches that interface"
    return ""


def _problems_of_resources(facts: MachineFacts) -> list[_Problem]:
    problems = []
    if 0 <= facts.free_shared_memory <= MIN_SHARED_MEMORY:
        free = format_size(facts.free_shared_memory)
        what = f"/dev/shm has {free} free; data workers, NCCL and checkpoints in memory need more"
        hint = "docker run --shm-size 16g, or an emptyDir with medium: Memory"
        problems.append(_Problem(kind="shared memory", what=what, hint=hint, badness=-facts.free_shared_memory))
    if 0 <= facts.free_disk < MIN_DISK:
        what = f"{format_size(facts.free_disk)} are free where the run folder is"
        hint = "another --run-dir, or --checkpoint.keep 1"
        problems.append(_Problem(kind="disk", what=what, hint=hint, badness=-facts.free_disk))
    if 0 < facts.open_files < MIN_OPEN_FILES:
        what = f"a process may open only {facts.open_files} files"
        problems.append(_Problem(kind="open files", what=what, hint="ulimit -n 65536", badness=-facts.open_files))
    return problems
