"""The house keeps its shape: who imports whom, how long things are, what needs no torch, what is public."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"
ORDER = [
    ("user_code",), ("errors",), ("plugins", "events", "pulse", "talk", "traffic", "faults"), ("spec",), ("schedule",), ("plan",), ("order",), ("store",),
    ("launch",), ("survive",), ("watch",), ("start",), ("torch_private",), ("torch_modes", "nested", "scalar", "signatures"), ("job", "job_fields", "job_parameters", "job_transfer", "world", "worlds", "streams"), ("feed",),
    ("measure",), ("place",), ("step",), ("train",), ("prove",), ("hf",), ("verbs",), ("cli",), ("__main__", "__init__"),
]  # fmt: skip
RANK = {name: place for place, names in enumerate(ORDER) for name in names}
FREE_OF_TORCH = [
    "user_code",
    "errors",
    "plugins",
    "events",
    "pulse",
    "talk",
    "traffic",
    "faults",
    "spec",
    "schedule",
    "plan",
    "order",
    "store",
    "launch",
    "start",
]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "examples" not in path.parts)


def room(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    own = RANK[room(path)]
    for module in imports(path):
        if module.startswith("paceline."):
            other = module.split(".")[1]
            assert RANK[other] <= own, f"{path.name} in {room(path)} imports {module}, which stands below it"
            if RANK[other] == own and own != RANK["errors"]:
                assert other == room(path) or len(ORDER[own]) > 1


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 450, f"{path.name} wants a wall"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{path.name}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stand_at_the_top(path: Path) -> None:
    if room(path) in ("verbs", "cli", "__init__"):
        return
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.If | ast.Try):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inner, f"{path.name}:{inner[0].lineno} imports inside a block"


def test_rooms_that_need_no_device_import_no_torch() -> None:
    code = (
        "import sys, importlib, pkgutil\n"
        "sys.modules['torch'] = None\n"
        f"names = {FREE_OF_TORCH!r}\n"
        "for name in names:\n"
        "    module = importlib.import_module('paceline.' + name)\n"
        "    for info in pkgutil.iter_modules(getattr(module, '__path__', [])):\n"
        "        importlib.import_module(f'paceline.{name}.{info.name}')\n"
        "import paceline.survive.agent, paceline.survive.decide, paceline.survive.nursery, paceline.survive.failure, paceline.watch.report\n"
        "import paceline.watch.sinks, paceline.watch.console, paceline.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_command_begins_without_torch_and_numpy() -> None:
    code = "import sys, paceline.verbs.table; assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.clock
def test_help_is_quick_and_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from paceline.cli import main\n"
        "main(['--help'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(time.perf_counter() - start)\n"
    )
    best = min(
        float(
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]
        )
        for _ in range(3)
    )
    assert best < 0.2


def test_public_names_are_few_and_all_there() -> None:
    code = "import paceline; assert len(paceline.__all__) <= 40; [getattr(paceline, n) for n in paceline.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_private_torch_is_touched_in_one_place() -> None:
    for path in FILES:
        if path.name not in ("torch_private.py", "torch_modes.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                    assert not any(a.name.startswith("_") for a in node.names), f"{path.name}:{node.lineno}"
        for module in imports(path):
            if path.name in ("torch_private.py", "torch_modes.py"):
                continue
            if module.startswith("torch."):
                parts = module.split(".")
                assert not any(part.startswith("_") for part in parts[1:]), f"{path.name} imports {module}"


def test_every_setting_is_documented() -> None:
    from paceline.spec.read import known_settings

    text = (ROOT / "docs" / "settings.md").read_text()
    missing = [name for name in known_settings() if f"`{name}`" not in text]
    assert not missing


def test_examples_for_new_and_on_top_are_the_same_files() -> None:
    for path in sorted((PACKAGE / "examples").glob("*.py")):
        if path.name != "__init__.py":
            assert (ROOT / "examples" / path.name).resolve() == path.resolve(), path.name
