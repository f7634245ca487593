"""Jobs from Hugging Face configs and folders: `pl.hf.job(...)`. transformers is imported when it is first used.

Start with `hf_job.py`.

- `config_only_job.py`: A job from a Hugging Face config alone, with placeholder rows of the right shape, for plans.
- `hf_job.py`: The function `pl.hf.job`, which returns a Job from a Hugging Face config or folder.
- `hf_model.py`: The `model` of a job: built from a Hugging Face config, or from a folder with weights.
- `tokenize_and_mask.py`: Rows and batches for Hugging Face models: tokens, masks, labels and padding.
- `weight_conversion.py`: The conversion of a Hugging Face folder's tensors to the model's, by transformers' own
  conversion table.
"""

import importlib
import sys
from typing import Any

from paceline.errors import MachineError

_PUBLIC = {"job": "paceline.hf.hf_job", "FolderModel": "paceline.hf.hf_model", "ConfigModel": "paceline.hf.hf_model"}

__all__ = ["ConfigModel", "FolderModel", "job"]


def __getattr__(name: str) -> Any:
    if name == "hf":  # `pl.hf` imports this module and looks up the name "hf" in it, as for every public name
        return sys.modules[__name__]
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise MachineError(
            f"pl.hf.{name} needs transformers, which is not installed.", hint="pip install 'paceline[hf]'"
        ) from None


def __dir__() -> list[str]:
    return sorted(__all__)
