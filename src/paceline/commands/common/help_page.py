"""The page that `paceline VERB --help` prints: usage, an example, options in four groups, and common settings."""

import ast
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

EXAMPLES = {
    "new": "paceline new digits",
    "train": "paceline train job.py --ranks 2 --layout fsdp --train.steps 1000",
    "verify": "paceline verify job.py --ranks 2 --layout fsdp",
    "plan": "paceline plan job.py --cluster 8xH100-80G",
    "simulate": 'paceline simulate job.py --cluster 16x8xH100-80G@ib-ndr --failures "50000 h"',
    "evaluate": "paceline evaluate runs/job/NAME --split test",
    "compare": "paceline compare job.py --layouts single ddp --ranks 2",
    "report": "paceline report runs/job/NAME",
    "why": "paceline why runs/job/NAME",
    "check": "paceline check -- torchrun --nproc-per-node 2 train.py",
    "record": "paceline record --out two -- torchrun --nproc-per-node 2 train.py",
    "verify-script": "paceline verify-script --one 'python train.py' --many 'torchrun --nproc-per-node 2 train.py'",
    "doctor": "paceline doctor job.py --nodes 3:host1 --run-dir /shared/runs",
    "submit": "paceline submit job.py --to slurm --nodes 2 --ranks-per-node 8 --hours 12 --run-dir runs/first",
    "ckpt": "paceline ckpt ls runs/job/NAME",
    "config": "paceline config job.py --train.precision bf16",
}
SETTINGS = {  # the most used settings: the placeholder of the value, and a description
    "train.steps": ("N", "stop after this many optimizer steps"),
    "train.epochs": ("N", "stop after this many passes over the data"),
    "train.global_batch_size": ("N", "samples per optimizer step, over all ranks"),
    "train.micro_batch_size": ("N", "samples per forward of one replica"),
    "train.precision": ("P", "fp32, bf16 or fp16"),
    "train.max_grad_norm": ("X", "clip the gradient to this global norm"),
    "data.workers": ("N", "data worker processes per rank"),
    "eval.every": ("N", "evaluate every N steps"),
    "checkpoint.every": ("N", "save every N steps"),
    "job.NAME": ("VALUE", "a parameter of make_job, such as --job.lr 1e-3"),
}
_GROUPS: dict[str, tuple[str, ...]] = {
    "where": ("ranks", "nodes", "node", "ranks_per_node", "layout", "layouts", "device", "cluster", "run_dir"),
    "what": (),  # every option that no other group lists
    "check": ("dry_run", "faults"),
    "output": ("page", "to", "verbose", "json"),
}
_GROUPED_OPTIONS = {name for names in _GROUPS.values() for name in names}
_COLUMN, _WIDTH = 32, 110  # the start of the descriptions, and the end of the lines
_SHORT_FLAGS = {"verbose": "-v, "}
_PLACEHOLDERS = {
    "update": "RULE",
    "compress": "METHOD",
    "run_dir": "FOLDER",
    "to": "FOLDER",
    "resume": "RUN",
    "allow": "NAMES",
    "failures": "TIME",
}
_POSITIONAL = ("name", "job", "what", "run", "runs", "other")


def help_page(verb: str, options: type, *, takes_settings: bool, takes_command: bool = False) -> str:
    """Return the help of one verb. `options` is a dataclass whose attribute docstrings describe the options."""
    descriptions, option_types = _descriptions(options), get_type_hints(options)
    positional = [field for field in fields(options) if field.name in _POSITIONAL]
    optional = [field for field in fields(options) if field.name not in _POSITIONAL]
    usage = " ".join(["", *(_positional_placeholder(field) for field in positional)])
    more = " [settings]" * takes_settings + " -- COMMAND" * takes_command
    lines = [f"usage: paceline {verb}{usage} [options]{more}", ""]
    lines += [*textwrap.wrap(" ".join((options.__doc__ or "").split()), _WIDTH), f"  {EXAMPLES[verb]}"]
    if any(descriptions.get(field.name) for field in positional):
        lines += [
            "",
            *(
                line
                for field in positional
                for line in _wrapped_rows(_positional_placeholder(field), descriptions.get(field.name, ""))
            ),
        ]
    for title, names in _GROUPS.items():
        group = [field for field in optional if (field.name in names if names else field.name not in _GROUPED_OPTIONS)]
        rows = [
            line
            for field in group
            for line in _option_rows(field, option_types[field.name], descriptions.get(field.name, ""))
        ]
        rows += _wrapped_rows("-h, --help", "Print this page.") if title == "output" else []
        lines += ["", title, *rows] if rows else []
    if takes_settings:
        lines += ["", "settings: the ten most used; `paceline config JOB` prints all"]
        lines += [
            line
            for name, (placeholder, text) in SETTINGS.items()
            for line in _wrapped_rows(f"--{name} {placeholder}", text)
        ]
    return "\n".join(lines)


def _positional_placeholder(field: "Field[object]") -> str:
    word = field.name.removesuffix("s").upper()
    if field.name == "runs":
        return f"{word} {word} | JOB --layouts A B"
    return word if field.default is MISSING else f"[{word}]"


def _option_rows(field: "Field[object]", option_type: Any, text: str) -> Iterator[str]:
    flag = f"{_SHORT_FLAGS.get(field.name, '')}--{field.name.replace('_', '-')}"
    default = field.default
    shows_default = "default:" in text or default in (None, False, "", (), MISSING)
    default_text = f"{default:g}" if isinstance(default, float) else default
    yield from _wrapped_rows(
        f"{flag} {_placeholder(field.name, option_type)}".rstrip(),
        text if shows_default else f"{text.rstrip('.')}; default: {default_text}.",
    )


def _placeholder(name: str, option_type: Any) -> str:
    """Return the placeholder for an option's value; empty for a switch."""
    inner_types = [each for each in get_args(option_type) if each is not type(None)]
    if get_origin(option_type) is tuple:
        return "A B ..."
    by_type: dict[Any, str] = {
        bool: "",
        int: "N",
        float: "X",
        Path: "FILE",
        str: "REFERENCE" if name == "against" else name.upper(),
    }
    if name == "to" and option_type is str:
        return "SCHEDULER"
    return _PLACEHOLDERS.get(name, by_type.get(inner_types[0] if inner_types else option_type, ""))


def _wrapped_rows(head: str, text: str) -> Iterator[str]:
    first, *rest = textwrap.wrap(text, _WIDTH - _COLUMN) or [""]
    if len(head) > _COLUMN - 4:
        yield f"  {head}"
        head = ""
    yield f"  {head:<{_COLUMN - 2}}{first}".rstrip()
    yield from (" " * _COLUMN + line for line in rest)


def _descriptions(options: type) -> dict[str, str]:
    """Return the docstring below each field, from the source of the class and of its base classes."""
    descriptions: dict[str, str] = {}
    for cls in reversed(options.__mro__[:-1]):
        tree = ast.parse(Path(str(sys.modules[cls.__module__].__file__)).read_text(encoding="utf-8"))
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
        for node, following in pairwise(body):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(following, ast.Expr)
            ):
                descriptions[node.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return descriptions
