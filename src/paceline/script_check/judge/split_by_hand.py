"""Recognition of models that a script splits over ranks by itself, on plain tensors, as Megatron-LM does.

The ranks of such a script read the same samples, and have parts of some weights, or other layers. Weights that somebody
forgot to seed look otherwise: then all random weights differ. So what tells is a mixture.
"""

from collections.abc import Sequence

import numpy as np

from paceline.script_check.judge.script_run import ScriptRun, ScriptStep
from paceline.script_check.recording import TensorPrint

REASON = (
    "the ranks read the same samples, and some of their weights differ from the start while other random weights are"
    " equal, as in tensor or pipeline parallelism that is written by hand; verify-script compares it with one process"
)
_CONSTANT = 1e-6  # relative, of a norm that all elements of equal size have


def is_split_by_hand(run: ScriptRun, *, has_same_samples: bool) -> bool:
    """Return whether the ranks seem to have parts of a model, of which each needs the same samples."""
    return has_same_samples and any(_is_split(step) for step in run.start)


def _is_split(step: ScriptStep) -> bool:
    first, *others = step.weights
    if any(weights.keys() != first.keys() for weights in others):
        return True
    if any(weights[name].numel != each.numel for weights in others for name, each in first.items()):
        return True
    random = [name for name, each in first.items() if not _is_constant(each)]
    equal = [_is_equal([weights[name] for weights in step.weights]) for name in random]
    return any(equal) and not all(equal)


def _is_equal(prints: Sequence[TensorPrint]) -> bool:
    return len({each.digest for each in prints}) == 1


def _is_constant(tensor: TensorPrint) -> bool:
    """Return whether all elements have the same size, as those of a new bias or of a new norm."""
    return bool(abs(tensor.norm - tensor.largest * np.sqrt(tensor.numel)) <= _CONSTANT * max(tensor.norm, 1e-300))
