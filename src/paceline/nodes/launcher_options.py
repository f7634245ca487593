"""Map the options of other launchers and of Slurm to one line of Paceline's: how many nodes there are, and where.

The options of torchrun, accelerate and Lightning are translated together, because the right words for one of them
depend on the others: `--nproc-per-node 4` is `--ranks 4` on one machine, and `--ranks-per-node 4` on several.
"""

import math
import re
from collections.abc import Collection, Sequence
from enum import Enum

from paceline.nodes.node_place import COUNTS, DEFAULT_PORT

EXAMPLE_HOST = "HOST"


class LauncherWord(Enum):
    """The meaning of an option of another launcher."""

    NODES = "number of nodes"
    RANKS_PER_NODE = "number of ranks on each node"
    RANKS = "number of ranks on all nodes together"
    NODE = "number of this node"
    HOST = "address of the first node"
    PORT = "port of the first node"
    ENDPOINT = "address and port of the first node"
    NEEDLESS = "nothing that Paceline needs"


PLACE_WORDS = (LauncherWord.HOST, LauncherWord.PORT, LauncherWord.ENDPOINT)
"""The words that say where the nodes meet."""
LAUNCHER_OPTIONS: dict[str, LauncherWord] = {
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), LauncherWord.NODES),
    **dict.fromkeys(
        (
            "nproc_per_node", "ntasks_per_node", "gpus_per_node", "devices", "nproc", "gpus", "num_gpus", "n_gpus",
            "ngpus", "ranks_per_node",
        ),
        LauncherWord.RANKS_PER_NODE,
    ),
    **dict.fromkeys(("num_processes", "world_size", "np", "ntasks", "ranks"), LauncherWord.RANKS),
    **dict.fromkeys(("node_rank", "machine_rank"), LauncherWord.NODE),
    **dict.fromkeys(("master_addr", "main_process_ip"), LauncherWord.HOST),
    **dict.fromkeys(("master_port", "main_process_port"), LauncherWord.PORT),
    "rdzv_endpoint": LauncherWord.ENDPOINT,
    **dict.fromkeys(("rdzv_backend", "rdzv_id", "rdzv_conf", "standalone"), LauncherWord.NEEDLESS),
}  # fmt: skip
SLURM_OPTIONS = (
    "exclude", "nodelist", "partition", "account", "qos", "constraint", "reservation", "mail_user", "mail_type",
    "cpus_per_task", "cpus_per_gpu", "mem", "mem_per_cpu", "mem_per_gpu", "gres", "licenses", "begin", "dependency",
)  # fmt: skip
"""Options of srun and sbatch that choose the machines and their parts, or who pays and hears of them."""
SBATCH_OPTIONS = (
    "output", "error", "job_name", "exclusive", "signal", "requeue", "open_mode", "chdir", "comment", "nice", "export",
)  # fmt: skip
"""Further options of sbatch, whose names mean something else to other tools."""
_SHORT_OPTIONS = {
    "N": "nnodes", "n": "ntasks", "p": "partition", "A": "account", "q": "qos", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_SHORT_SBATCH_OPTIONS = _SHORT_OPTIONS | {
    "t": "time", "c": "cpus_per_task", "G": "gpus", "J": "job_name", "o": "output", "e": "error", "a": "array",
    "d": "dependency", "C": "constraint", "D": "chdir", "L": "licenses", "b": "begin",
}  # fmt: skip
TIME_LIMITS = ("time", "time_limit", "walltime")
_COUNT_PART = re.compile(r"(\d+)(?::(\d+)(?![\w.-]))?")
_SLURM_TIME = re.compile(r"((?P<days>\d+)-)?(?P<first>\d+)(:(?P<second>\d+))?(:(?P<third>\d+))?")
_PORT = re.compile(r"(.*?):(\d+)")
_PLACE = re.compile(rf"(?P<counts>{COUNTS.pattern})(:(?P<host>[^:]+)(:(?P<port>\d+))?)?")
_SHORT_OPTION = re.compile(r"-([A-Za-z])=?(.*)")


def option_name(flag: str) -> str:
    """Return the name of an option as in the tables: `nproc_per_node` for `--nproc-per-node`."""
    return flag.lstrip("-").replace("-", "_").lower()


def expand_short_options(arguments: Sequence[str], *, is_sbatch: bool) -> list[str]:
    """Return the words with the long names of Slurm's short options: `--ntasks` for `-n`, and `--ntasks=2` for `-n2`.

    With `is_sbatch`, they are all that sbatch has; otherwise those that hardly mean anything else.
    """
    letters = _SHORT_SBATCH_OPTIONS if is_sbatch else _SHORT_OPTIONS
    expanded: list[str] = []
    for word in arguments:
        match = _SHORT_OPTION.fullmatch(word)
        name = None if match is None else "np" if word == "-np" else letters.get(match[1])
        if match is None or name is None or (match[2] and word != "-np" and not (is_sbatch or match[2].isdecimal())):
            expanded.append(word)
            continue
        value = "" if word == "-np" else match[2]
        expanded.append(f"--{name.replace('_', '-')}" + (f"={value}" if value else ""))
    return expanded


def names_nodes(arguments: Sequence[str]) -> bool:
    """Return whether the options are those of a run on several nodes, in Paceline's words or in another launcher's."""
    values = dict(option_values(arguments))
    if "nodes" in values:
        return True
    counts = [value for name, value in values.items() if LAUNCHER_OPTIONS.get(name) is LauncherWord.NODES]
    return any(value != "1" for value in counts)


def translate_launcher_options(arguments: Sequence[str], options: Collection[str], *, takes_host: bool) -> str:
    """Return the words for the launcher options in `arguments`, in the spelling of a verb; empty if it needs none.

    `options` has the names of the verb's options. With `takes_host`, its `--nodes` names a host, too.
    """
    typed: dict[LauncherWord, str] = {}
    for name, value in option_values(arguments):
        if name in LAUNCHER_OPTIONS and name not in options:
            typed[LAUNCHER_OPTIONS[name]] = value
    own = dict(option_values(arguments))
    words: list[str] = []
    nodes = typed.get(LauncherWord.NODES, "")
    is_alone = nodes == "1" and "nodes" not in own
    place_words = set(typed) - {LauncherWord.RANKS_PER_NODE, LauncherWord.RANKS, LauncherWord.NEEDLESS}
    has_place = "nodes" in own
    if takes_host and has_place and place_words:
        words += _completed_place(own["nodes"], typed)
    elif place_words and not is_alone and not has_place and "nodes" in options:
        count = nodes if COUNTS.fullmatch(nodes) else "2"
        words += ["--nodes", f"{count}:{_head(typed)}" if takes_host else largest_count(count)]
        has_place = True
    if not is_alone:
        words += _ranks(typed, options, own=own, count=largest_count(own.get("nodes") or nodes), has_place=has_place)
    elif (ranks := typed.get(LauncherWord.RANKS_PER_NODE) or typed.get(LauncherWord.RANKS, "")).isdecimal():
        words += ["--ranks" if "ranks" in options else "--ranks-per-node", ranks]
    node = typed.get(LauncherWord.NODE, "")
    if node.isdecimal() and "node" in options and not is_alone:
        words += ["--node", node]
    return " ".join(words)


def largest_count(nodes: str) -> str:
    """Return the number of nodes in a value of `--nodes`, the larger of two: "4" for "2:4:host1"; "2" without any."""
    match = _COUNT_PART.match(nodes)
    return "2" if match is None else str(max(1, *(int(count or 0) for count in match.groups())))


def count_part(nodes: str) -> str:
    """Return the numbers in a value of `--nodes`: "2:4" for "2:4:host1", and "2" for "2:host1"; "2" without any."""
    match = _COUNT_PART.match(nodes)
    return "2" if match is None else match[0]


def slurm_hours(text: str) -> float | None:
    """Return a time limit of Slurm in hours; None if it can't be read.

    Its forms are MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, and DAYS-HOURS:MINUTES[:SECONDS].
    """
    match = _SLURM_TIME.fullmatch(text)
    if match is None:
        return None
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"]:
        seconds = int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    elif match["third"]:
        seconds = first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    return math.ceil(seconds / 36) / 100


def option_values(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options with their values, by their names as in the tables; empty for an option without a value."""
    found: list[tuple[str, str]] = []
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            found.append((option_name(flag), value if equals else "" if following.startswith("--") else following))
    return found


def _head(typed: dict[LauncherWord, str]) -> str:
    """Return where the nodes meet, as a part of `--nodes`."""
    endpoint = typed.get(LauncherWord.ENDPOINT) or ""
    match = _PORT.fullmatch(endpoint)
    host, port = (match[1], match[2]) if match else (endpoint, "")
    host, port = typed.get(LauncherWord.HOST) or host or EXAMPLE_HOST, typed.get(LauncherWord.PORT) or port
    return f"{host}:{port}" if port.isdecimal() and port != str(DEFAULT_PORT) else host


def _completed_place(nodes: str, typed: dict[LauncherWord, str]) -> list[str]:
    """Return `--nodes` with the host and the port that are typed in another launcher's words, if it lacks them."""
    match = _PLACE.fullmatch(nodes)
    if match is None:
        return []
    if not match["host"]:
        return ["--nodes", f"{nodes}:{_head(typed)}"]
    endpoint = _PORT.fullmatch(typed.get(LauncherWord.ENDPOINT, ""))
    port = typed.get(LauncherWord.PORT) or (endpoint[2] if endpoint else "")
    if not port.isdecimal() or port == match["port"]:
        return []
    return ["--nodes", f"{match['counts']}:{match['host']}:{port}"]


def _ranks(
    typed: dict[LauncherWord, str], options: Collection[str], *, own: dict[str, str], count: str, has_place: bool
) -> list[str]:
    """Return the option for the number of ranks: of each node if there are several, else of this machine."""
    per_node, all_ranks = typed.get(LauncherWord.RANKS_PER_NODE, ""), typed.get(LauncherWord.RANKS, "")
    is_per_node = "ranks_per_node" in options and (has_place or "ranks" not in options)
    if is_per_node and not per_node and all_ranks.isdecimal() and int(all_ranks) % int(count) == 0:
        per_node = str(int(all_ranks) // int(count))
    ranks = per_node or all_ranks
    if is_per_node:
        return ["--ranks-per-node", ranks] if ranks.isdecimal() and "ranks_per_node" not in own else []
    return ["--ranks", ranks] if "ranks" in options and ranks.isdecimal() and "ranks" not in own else []
