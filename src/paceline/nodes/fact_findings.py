"""Judgement of the facts of machines: what each one lacks, and what differs between them."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.console.formatting import first_names, format_size
from paceline.nodes.finding import Finding, format_nodes
from paceline.nodes.machine_facts import MachineFacts

Facts = Mapping[int, MachineFacts]
"""The facts of each node, by its number."""
MIN_SHARED_MEMORY, MIN_DISK, MIN_OPEN_FILES = 64 << 20, 1 << 30, 1024
_Problem = tuple[str, str]
"""What is wrong with one machine, and what to do."""
_MAX_SKEW_SECONDS = 1.0
_MAX_NAMES = 4
_UNSET = "unset"

_COMPARED: tuple[tuple[Callable[[MachineFacts], Mapping[str, Any]], str], ...] = (
    (lambda facts: {"python": facts.python, **facts.packages}, "the same image, or the same lock file, on every node"),
    (lambda facts: facts.code, "the same commit on every node"),
    (lambda facts: facts.data, "the same data on every node"),
    (lambda facts: facts.variables, "export it on every node, or on none"),
    (lambda facts: {"vector unit": facts.vector_unit}, "nodes of one kind, or export MKL_CBWR=AVX2 on every node"),
    (lambda facts: {"list of GPUs": ", ".join(facts.gpus) or "none"}, "nodes of one kind"),
    (lambda facts: {"GPU driver": facts.gpu_driver or "none"}, "the same driver on every node"),
    (lambda facts: {"MTU": facts.mtu}, "ip link set DEVICE mtu BYTES: the smallest of them, on every node"),
)
"""What is compared between nodes: the values by name, and what to do if they differ."""


def judge_facts(facts: Facts, *, skews: Mapping[int, float] | None = None) -> list[Finding]:
    """Return what is wrong with the machines, one finding for each cause.

    `skews` has the seconds by which each node's clock is ahead of the head's.
    """
    found = [finding for read, hint in _COMPARED for finding in _differences(facts, read, hint)]
    nodes_by_problem: dict[_Problem, list[int]] = {}
    for node, machine in facts.items():
        skew = (skews or {}).get(node, 0.0)
        for problem in _problems_of_machine(machine, skew=skew, is_alone=len(facts) == 1):
            nodes_by_problem.setdefault(problem, []).append(node)
    for (what, hint), nodes in nodes_by_problem.items():
        name = "this machine" if len(facts) == 1 else format_nodes(nodes)
        host = f" ({facts[nodes[0]].host})" if len(nodes) == 1 else ""
        found.append(Finding(what=f"{name}{host}: {what}", hint=hint, nodes=tuple(nodes)))
    return found


def _differences(facts: Facts, read: Callable[[MachineFacts], Mapping[str, Any]], hint: str) -> list[Finding]:
    """Return one finding for all names whose values differ in the same way, for example for all packages."""
    values = {node: read(machine) for node, machine in facts.items()}
    names_by_split: dict[tuple[int, ...], list[str]] = {}
    for name in sorted({name for own in values.values() for name in own}):
        told = {node: own.get(name, _UNSET) for node, own in values.items()}
        if len(set(told.values())) > 1:
            names_by_split.setdefault(_minority(told), []).append(name)
    return [
        Finding(what=_difference_text(names, values), hint=hint, nodes=minority)
        for minority, names in names_by_split.items()
    ]


def _minority(told: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the nodes whose value differs from that of most nodes, or from that of node 0 if there is no majority."""
    counts = [(list(told.values()).count(value), -node, value) for node, value in told.items()]
    usual = max(counts, key=lambda entry: entry[:2])[2]
    return tuple(node for node, value in told.items() if value != usual)


def _difference_text(names: list[str], values: Mapping[int, Mapping[str, Any]]) -> str:
    nodes_by_value: dict[Any, list[int]] = {}
    for node, own in values.items():
        nodes_by_value.setdefault(own.get(names[0], _UNSET), []).append(node)
    parts = [f"{value} on {format_nodes(nodes)}" for value, nodes in nodes_by_value.items()]
    others = f" (so do {first_names(names[1:], max_names=_MAX_NAMES)})" if len(names) > 1 else ""
    return f"{names[0]} differs: {', '.join(parts)}{others}"


def _problems_of_machine(facts: MachineFacts, *, skew: float, is_alone: bool) -> list[_Problem]:
    problems = [] if is_alone else _problems_of_name(facts)
    for variable, value in facts.interface_variables.items():
        problem = _interface_problem(variable, value, facts, is_alone=is_alone)
        if problem:
            hint = f"export {variable}={facts.interface or 'INTERFACE'}"
            problems.append((f"{variable}={value}, but {problem}", hint))
    if abs(skew) > _MAX_SKEW_SECONDS:
        what = f"its clock is {skew:+.1f} s off that of node 0; torchrun compares clocks to find dead nodes"
        problems.append((what, "chronyc makestep (in a container: on the machine below it)"))
    return [*problems, *_problems_of_resources(facts)]


def _problems_of_name(facts: MachineFacts) -> list[_Problem]:
    """Return what makes gloo listen at an address that no other node reaches."""
    if "GLOO_SOCKET_IFNAME" in facts.interface_variables:
        return []
    hint = f"export GLOO_SOCKET_IFNAME={facts.interface or 'INTERFACE'}"
    if not facts.host_address:
        return [("its own name resolves to nothing", hint)]
    if not facts.host_address.startswith("127.") or facts.address.startswith("127."):
        return []
    what = f"its own name resolves to {facts.host_address}, where gloo would listen, and no other node reaches it"
    return [(what, f"{hint}, or {facts.address} {facts.host} in /etc/hosts")]


def _interface_problem(variable: str, value: str, facts: MachineFacts, *, is_alone: bool) -> str:
    """Return what is wrong with a variable that names interfaces; empty if nothing is.

    gloo takes names. NCCL takes prefixes of names, `=` before an exact name, and `^` before those to leave out.
    """
    names = [interface.name for interface in facts.interfaces]
    if variable.startswith("GLOO") and value[0] in "^=":
        return f"gloo takes only names, and {value[0]} is NCCL's spelling"
    if value.startswith("^"):
        return ""
    asked = value.removeprefix("=").split(",")
    is_exact = variable.startswith("GLOO") or value.startswith("=")
    matching = [name for name in names if (name in asked if is_exact else name.startswith(tuple(asked)))]
    if not matching:
        return f"it has {', '.join(names)}"
    if not is_alone and facts.interface and facts.interface not in matching:
        return f"the way to node 0 is {facts.interface}"
    return ""


def _problems_of_resources(facts: MachineFacts) -> list[_Problem]:
    problems = []
    if 0 <= facts.free_shared_memory < MIN_SHARED_MEMORY:
        free = format_size(facts.free_shared_memory)
        what = f"/dev/shm has {free} free; data workers, NCCL and checkpoints in memory need more"
        problems.append((what, "docker run --shm-size 16g, or an emptyDir with medium: Memory"))
    if facts.run_folder_problem:
        what = f"the run folder can't be written: {facts.run_folder_problem}"
        problems.append((what, "chown it, or another --run-dir"))
    elif 0 <= facts.free_disk < MIN_DISK:
        what = f"{format_size(facts.free_disk)} are free where the run folder is"
        problems.append((what, "another --run-dir, or --checkpoint.keep 1"))
    if 0 < facts.open_files < MIN_OPEN_FILES:
        problems.append((f"a process may open only {facts.open_files} files", "ulimit -n 65536"))
    return problems
