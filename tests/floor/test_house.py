"""The house keeps its shape: who imports whom, how long things are, what needs no torch, what is public."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"
ORDER = [
    ("user_code",), ("errors",), ("plugins", "events", "console", "faults", "bytes_sent"), ("config",), ("schedule",), ("planner",),
    ("filesystem",), ("checkpoint.files",), ("run_folder",), ("nodes",), ("submit",), ("launch",), ("reporting",), ("torch_internals",),
    ("job", "job_field_checks", "job_parameters", "job_transfer"), ("comm",), ("data",), ("profiling",), ("parallel",), ("step",),
    ("checkpoint",), ("trainer",), ("verification",), ("measured_planning",), ("custom_loop", "hf"), ("commands",), ("script_check",), ("cli",),
    ("__main__", "__init__"),
]  # fmt: skip
RANK = {name: place for place, names in enumerate(ORDER) for name in names}
FREE_OF_TORCH = [
    "user_code",
    "errors",
    "plugins",
    "events",
    "console",
    "faults",
    "bytes_sent",
    "config",
    "schedule",
    "planner",
    "filesystem",
    "checkpoint.files",
    "run_folder",
    "nodes",
    "submit",
    "reporting",
    "data.order",
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "examples" not in path.parts)

pytestmark = pytest.mark.one_worker  # which parses each file once


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package_of(module: str) -> str:
    """The entry of `ORDER` that a module, `parallel.sharding.units`, belongs to: the longest that it begins with."""
    names = module.split(".")
    return next(".".join(names[:n]) for n in range(len(names), 0, -1) if ".".join(names[:n]) in RANK)


def room(path: Path) -> str:
    return package_of(str(path.relative_to(PACKAGE)).removesuffix(".py").replace("/", "."))


@cache
def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = []
    for path in FILES:
        own = RANK[room(path)]
        for module in imports(path):
            if module.startswith("paceline."):
                other = package_of(module.removeprefix("paceline."))
                if RANK[other] > own:
                    wrong.append(f"{path.name} in {room(path)} imports {module}, which stands below it")
                if RANK[other] == own and own != RANK["errors"]:
                    assert other == room(path) or len(ORDER[own]) > 1
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {str(p.relative_to(PACKAGE.parent)).removesuffix(".py").replace("/", "."): imports(p) for p in FILES}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name in done or name not in graph:
            return
        for other in graph[name]:
            walk(other, (*path, name))
        done.add(name)

    for name in graph:
        walk(name, ())


def test_files_and_functions_are_small() -> None:
    long = []
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > 450:
            long.append(f"{path.name} has {len(text.splitlines())} lines, and wants a wall")
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    long.append(f"{path.name}: {node.name} has {length} lines")
    assert not long, "\n".join(long)


def test_imports_stand_at_the_top() -> None:
    inside = [
        f"{path.name}:{inner.lineno} imports inside a block"
        for path in FILES
        if room(path) not in ("commands", "cli", "__init__")
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.FunctionDef | ast.If | ast.Try)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert not inside, "\n".join(inside)


def test_a_file_name_says_one_thing() -> None:
    """A traceback shows base names: no two files share one, but for the twins of a chain's and a graph's stages."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        if path.stem != "__init__":
            found.setdefault(path.stem, []).append(str(path.relative_to(PACKAGE)))
    twins = {"split", "stages", "simulate", "sitecustomize"}  # Python knows the last one by its name
    assert {stem: paths for stem, paths in found.items() if len(paths) > 1 and stem not in twins} == {}


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    """At most 16 modules and packages side by side; the package's own folder, which holds the parts, has more."""
    for folder in {path.parent for path in FILES} - {PACKAGE}:
        inside = [p for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
        assert len(inside) - 1 <= 16, f"{folder.relative_to(PACKAGE)} has {len(inside) - 1}"


def test_each_package_says_what_it_is_for() -> None:
    for path in FILES:
        if path.stem == "__init__":
            said = ast.get_docstring(syntax_tree(path)) or ""
            assert len(said.split()) >= 4, f"{path.relative_to(PACKAGE)} has no docstring"


def test_files_that_are_named_in_strings_are_there() -> None:
    """Frames are told by the end of their file's name: a file that moves takes its name along."""
    files = {"/" + str(path.relative_to(PACKAGE.parent)) for path in FILES}
    for path in FILES:
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in re.findall(r"^[\w/]*/\w+\.py$", node.value):
                    is_ours = not name.startswith("/torch/") and "paceline/examples" not in name
                    assert not is_ours or any(file.endswith(name) for file in files), f"{path.name}: {name}"


def test_rooms_that_need_no_device_import_no_torch() -> None:
    code = (
        "import sys, importlib, pkgutil\n"
        "sys.modules['torch'] = None\n"
        f"names = {FREE_OF_TORCH!r}\n"
        "for name in names:\n"
        "    module = importlib.import_module('paceline.' + name)\n"
        "    for info in pkgutil.walk_packages(getattr(module, '__path__', []), f'paceline.{name}.'):\n"
        "        importlib.import_module(info.name)\n"
        "import paceline.launch.agent.supervisor, paceline.launch.failures.first_failure, paceline.launch.agent.forkserver, paceline.launch.failures.failure_record, paceline.reporting.run_report\n"
        "import paceline.reporting.sinks.sink_registry, paceline.reporting.sinks.log_tail, paceline.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_command_begins_without_torch_and_numpy() -> None:
    code = "import sys, paceline.commands.command_table; assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_quick_and_needs_neither_torch_nor_numpy() -> None:
    """A module costs about half a millisecond; Python itself begins with about a hundred."""
    code = (
        "import contextlib, sys\n"
        "from paceline.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 220


def test_public_names_are_few_and_all_there() -> None:
    assert len(paceline.__all__) <= 40
    assert all(hasattr(paceline, name) for name in paceline.__all__)


def test_private_torch_is_touched_in_one_place() -> None:
    for path in FILES:
        if path.name not in ("private_api.py", "dispatch_modes.py"):
            for node in ast.walk(syntax_tree(path)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                    assert not any(a.name.startswith("_") for a in node.names), f"{path.name}:{node.lineno}"
        for module in imports(path):
            if path.name in ("private_api.py", "dispatch_modes.py"):
                continue
            if module.startswith("torch."):
                parts = module.split(".")
                assert not any(part.startswith("_") for part in parts[1:]), f"{path.name} imports {module}"


def test_every_setting_is_documented() -> None:
    from paceline.config.merge_settings import known_settings

    text = (ROOT / "docs" / "settings.md").read_text()
    missing = [name for name in known_settings() if f"`{name}`" not in text]
    assert not missing


def test_examples_for_new_and_on_top_are_the_same_files() -> None:
    for path in sorted((PACKAGE / "examples").glob("*.py")):
        if path.name != "__init__.py":
            assert (ROOT / "examples" / path.name).resolve() == path.resolve(), path.name
