"""A verb is imported when it runs: a command loads its own files, and not those of the other verbs."""

import json
import subprocess
import sys

import pytest

from paceline.commands.command_table import VERBS
from paceline.plugins import resolve

COUNT = """
import json, sys
from paceline.cli import main
from paceline.commands.command_table import VERBS
from paceline.plugins import resolve
{run}
ours = [name for name in sys.modules if name.split(".")[0] == "paceline"]
print("\\n" + json.dumps([len(ours), "torch" in sys.modules]))
"""


def loaded(run: str) -> tuple[int, bool]:
    """How many files of the package a command loads, and whether it loads torch."""
    code = COUNT.format(run=run)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, has_torch = json.loads(done.stdout.splitlines()[-1])
    return count, has_torch


@pytest.mark.parametrize(
    ("run", "most"),
    [
        ('main(["--help"])', 12),  # 8, and the table of the test
        ('try:\n    main(["train", "--help"])\nexcept SystemExit:\n    pass', 25),
        ('resolve(VERBS["report"].run)', 67),
        ('resolve(VERBS["new"].run)', 15),
        ('resolve(VERBS["ckpt"].run)', 40),
    ],
)
def test_a_command_loads_its_own_files(run: str, most: int) -> None:
    count, has_torch = loaded(run)
    assert count <= most and not has_torch, f"{count} files, {'with' if has_torch else 'without'} torch"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "compare"])  # it reads recordings, with torch
def test_a_verb_runs_without_torch_in_its_own_process(verb: str) -> None:
    assert not loaded(f"resolve(VERBS[{verb!r}].run)")[1]


@pytest.mark.parametrize("verb", VERBS)
def test_the_names_in_the_table_are_there(verb: str) -> None:
    row = VERBS[verb]
    assert callable(resolve(row.run))
    options = resolve(row.options) if isinstance(row.options, str) else row.options
    assert options.__dataclass_fields__
