"""The environment of the fork server, and the choice of the kernels of exact mode, before torch is imported."""

import os
import sys
from collections.abc import Mapping

from paceline.errors import UsageError

_MATH_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KERNELS_VARIABLE = "MKL_CBWR"  # with which MKL selects its kernels
DEFAULT_EXACT_KERNELS = "AVX2"


def launch_environ(environ: Mapping[str, str], *, exact: bool) -> dict[str, str]:
    """Return the fork server's environment, with one thread for numerical libraries; workers set their own number."""
    variables = {**environ, **dict.fromkeys(_MATH_THREADS, "1"), "PYTHONUNBUFFERED": "1"}
    if exact:
        variables[KERNELS_VARIABLE] = variables.get(KERNELS_VARIABLE) or DEFAULT_EXACT_KERNELS
    return variables


def kernel_fingerprint() -> str:
    """Return the name of the numerical kernels of this process; digests are comparable only if this name is equal."""
    return os.environ.get(KERNELS_VARIABLE) or "default"


def choose_exact_kernels() -> bool:
    """Choose exact mode's kernels before torch is imported; return False if torch was imported without a choice."""
    if not os.environ.get(KERNELS_VARIABLE) and "torch" not in sys.modules:
        os.environ[KERNELS_VARIABLE] = DEFAULT_EXACT_KERNELS
    return bool(os.environ.get(KERNELS_VARIABLE))


def torch_imported_error(cause: str, *, hint: str = "") -> UsageError:
    """Return the error for exact mode that is requested after torch has chosen its kernels."""
    return UsageError(
        f"exact mode needs kernels that {KERNELS_VARIABLE} selects before torch is imported, but "
        "torch is already imported.",
        cause=cause,
        hint=hint or f"export {KERNELS_VARIABLE}={DEFAULT_EXACT_KERNELS}, then the same command",
    )
