"""Parse a reference to a job (`job.py`, `job.py:name` or `pkg.module:name`) and check it without importing the job."""

import ast
import sys
import tokenize
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from typing_extensions import override

from paceline.console.formatting import closest_word, did_you_mean
from paceline.errors import JobError, UsageError

FACTORY, OBJECT = "make_job", "job"  # the names in a job file, if a reference names none
_MODEL_FILES = ("config.json", "adapter_config.json", "model_index.json")
OBJECT_PREFIX = "object"  # `object:NAME` stands for a job that was passed as a Python object


@dataclass(frozen=True, kw_only=True)
class JobRef:
    """A reference to a job: a file or a module, and optionally a name in it."""

    path: Path | None = None
    module: str | None = None
    name: str | None = None

    @override
    def __str__(self) -> str:
        path_or_module = str(self.path) if self.path is not None else str(self.module)
        return f"{path_or_module}:{self.name}" if self.name else path_or_module

    @property
    def short(self) -> str:
        """Return the job's short name, after which its run folders are named."""
        return self.path.stem if self.path is not None else short_name(str(self.module))


def parse_jobref(text: str, *, is_on_nodes: bool = False) -> JobRef:
    """Parse a reference. If it names a file, the file must exist and define a job.

    With `is_on_nodes`, other machines train the same job, and the hint for a missing file says where it must be.

    Raises:
        UsageError: the text is no reference, or the file does not exist or is not Python.
        JobError: the file has a syntax error, or defines no job.
    """
    if not text.strip():
        raise UsageError("the job is empty: is a variable unset?", hint="job.py, job.py:name or pkg.module:name")
    path_or_module, _, name = split_jobref(text)
    if path_or_module == OBJECT_PREFIX:
        raise UsageError(
            f"the job {name!r} is a Python object, which a command can't import.",
            cause="the run was started from Python with a Job object, not with a job file",
            hint="pl.evaluate(run, job=job) and pl.train(job, run_dir=run) take the object",
        )
    if not path_or_module.endswith(".py") and "/" not in path_or_module and not Path(path_or_module).exists():
        if all(part.isidentifier() for part in path_or_module.split(".")) and path_or_module:
            _check_module(text, path_or_module.partition(".")[0])
            return JobRef(module=path_or_module, name=name or None)
        raise UsageError(f"{text!r} is not a job.", hint="job.py, job.py:name or pkg.module:name")
    path = Path(path_or_module)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # the name is too long, or has an invalid character
        raise UsageError(
            f"{path_or_module!r} is not a valid path: {getattr(error, 'strerror', error)}.", hint="job.py"
        ) from None
    if is_folder:
        raise _folder_error(path)
    if is_file and path.suffix in (".toml", ".json"):
        raise _not_python_error(path)
    if not is_file:
        suggestion = closest_word(path.stem, (file.stem for file in path.parent.glob("*.py")))
        found = str(path.with_name(f"{suggestion}.py")) if suggestion else ""
        hint = found or "paceline new text"
        if is_on_nodes:
            hint = "the job file must be at the same path on every node" + (f"; here is {found}" if found else "")
        raise UsageError(f"{path_or_module} does not exist.", where=str(Path.cwd()), hint=hint)
    ref = JobRef(path=path, name=name or None)
    _check_defines_job(ref)
    return ref


def _check_module(text: str, package: str) -> None:
    """Raise an error if a package is neither on Python's path nor in the working folder; import nothing."""
    package_folder = Path(package)
    if (
        package_folder.is_dir()
        or package_folder.with_suffix(".py").is_file()
        or package in sys.modules
        or find_spec(package) is not None
    ):
        return
    raise UsageError(
        f"{text!r} is not a job: no such file, folder or module.",
        where=str(Path.cwd()),
        hint="job.py, job.py:name or pkg.module:name; for `plan` and `simulate` also config.json, the folder with it, "
        "or transformers:SomeConfig",
    )


def _folder_error(path: Path) -> UsageError:
    """Return the error for a folder given as a job: what it is, and what to type instead."""
    if (path / "task.json").is_file():
        return UsageError(f"{path} is a run folder, not a job.", hint=f"paceline train --resume {path} continues it")
    if any((path / name).is_file() for name in _MODEL_FILES) or any(path.glob("*.safetensors")):
        return UsageError(
            f"{path} is a model's folder; a job also has data, a loss and an optimizer.",
            hint=f"paceline new hf writes a job for it; paceline plan {path} needs no data",
        )
    return UsageError(f"{path} is a folder, not a job.", hint=f"{path}/job.py")


def _not_python_error(path: Path) -> UsageError:
    """Return the error for a file of settings or of a model that was given as a job."""
    if path.suffix == ".toml":
        return UsageError(f"{path} is a settings file, not a job.", hint=f"paceline train JOB --config {path}")
    return UsageError(
        f"{path} is not a Python file; a job is a Python file with data, a loss and an optimizer.",
        hint=f"paceline new hf writes a job for a model's folder; paceline plan {path} needs no data",
    )


def split_jobref(text: str) -> tuple[str, str, str]:
    """Return the file or module, the colon if there is one, and the name; a path may contain colons."""
    if text.startswith(f"{OBJECT_PREFIX}:"):
        return text.partition(":")
    if text.endswith(".py"):
        return text, "", ""
    path, suffix, name = text.rpartition(".py:")
    return (f"{path}.py", ":", name) if suffix else text.partition(":")


def source_name(text: str) -> str:
    """Return the short name of a job's file or module; an empty string for a job that is a Python object.

    The name of an object says nothing about its source.
    """
    return "" if split_jobref(text)[0] == OBJECT_PREFIX else short_name(text)


def short_name(text: str) -> str:
    """Return the name of a job's run folders: the file's stem, the module's last part or the object's name."""
    path_or_module, _, name = split_jobref(text)
    if path_or_module == OBJECT_PREFIX:
        return Path(name).name.removesuffix(".py").lstrip(".") or "run"
    if path_or_module.endswith(".py") or "/" in path_or_module:
        return Path(path_or_module).stem
    parts = path_or_module.split(".")
    return parts[-1] if all(part.isidentifier() for part in parts) else path_or_module


def job_defaults(ref: JobRef) -> dict[str, str] | None:
    """Return the parameters of `make_job` with the source of their defaults; None if the source does not show them."""
    sources = parameter_sources(ref)
    return None if sources is None else {name: default for name, (_, default) in sources.items()}


def parameter_sources(ref: JobRef) -> dict[str, tuple[str, str]] | None:
    """Return, for each parameter of `make_job`, the source code of its annotation and of its default ('' for none).

    Return None if the source does not show the parameters: for a module, or a function with a decorator or `**kwargs`.
    """
    if ref.path is None:
        return None
    function = next((f for f in _functions(_parse_file(ref.path)) if f.name == (ref.name or FACTORY)), None)
    if function is None or function.args.kwarg is not None or function.decorator_list:
        return None
    positional = [*function.args.posonlyargs, *function.args.args]
    defaults = [None] * (len(positional) - len(function.args.defaults)) + function.args.defaults
    pairs = zip([*positional, *function.args.kwonlyargs], [*defaults, *function.args.kw_defaults], strict=True)
    return {a.arg: (_source_of(a.annotation), _source_of(default)) for a, default in pairs}


def _source_of(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _parse_file(path: Path) -> ast.Module:
    """Parse the file as Python does: with a byte order mark, or in the encoding that its first lines name."""
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read(), filename=str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise JobError(
            f"{path.name} is not valid Python: {error.msg}.",
            where=str(path) + (f":{error.lineno}" if error.lineno else "") + (f": {line}" if line else ""),
            hint=f"python -m py_compile {path}",
        ) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise JobError(f"{path.name} is not Python source: {error}.", where=str(path), hint="job.py") from None
    except RecursionError:
        raise JobError(
            f"the code in {path.name} is nested too deeply to be read.",
            where=str(path),
            hint="keep long tables in a data file",
        ) from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.", hint=f"ls -l {path}") from None


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _check_defines_job(ref: JobRef) -> None:
    """Raise an error if the file does not define the job. A file with `from ... import *` is not checked."""
    assert ref.path is not None
    tree = _parse_file(ref.path)
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body):
        return
    names = _defined_names(tree)
    expected = [ref.name] if ref.name else [FACTORY, OBJECT]
    if not names & set(expected):
        functions = [function.name for function in _functions(tree)]
        suggestion = f"{ref.path}:NAME, one of {', '.join(functions)}" if functions else ""
        raise JobError(
            f"{ref.path.name} defines no {' or '.join(expected)}.",
            where=str(ref.path),
            cause=did_you_mean(ref.name, functions) if ref.name else "",
            hint=(ref.name and suggestion) or "def make_job() -> pl.Job: return pl.Job(...)",
        )


def _defined_names(tree: ast.Module) -> set[str]:
    """Return the names defined at module level, not those inside functions or classes."""
    names: set[str] = set()
    remaining: list[ast.AST] = [tree]
    while remaining:
        node = remaining.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            remaining += ast.iter_child_nodes(node)
    return names | {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
