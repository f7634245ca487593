"""Start the recorder in each Python process of a recorded command, as soon as the process has imported torch.

The folder of this file is the first one on `PYTHONPATH`, so Python imports the file when it starts. It runs the
`sitecustomize` that it hides, and leaves torch's own loader in place. A fault here never ends the process.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_RECORDER = "paceline.script_check.recorder.script_recorder"
_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
_SOURCE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))  # noqa: PTH120


def _run_hidden_module() -> None:
    """Run the `sitecustomize` that Python would have found without this folder."""
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        hidden = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


class _TorchImport:
    """A finder that adds one call after the import of torch. Libraries may ask for torch's spec without an import."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._and_record(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _and_record(self, run: Any) -> Any:
        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            try:
                if _SOURCE_FOLDER not in sys.path:
                    sys.path.append(_SOURCE_FOLDER)
                importlib.import_module(_RECORDER).start_recorder(os.environ)
            except Exception as error:
                print(f"paceline: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)

        return exec_module


if os.environ.get("PACELINE_SCRIPT_RECORDING"):
    sys.meta_path.insert(0, _TorchImport())
_run_hidden_module()
