"""`paceline plan` of models that nothing here could hold, from the config to the answer: seconds, memory, what it says.

    python -m benchmarks.large [--cases llama-8b llama-70b llama-405b] [--out FILE]

Each case is a real command on a Hugging Face config: the model's numbers, the search, the recommended layout replayed.
Seconds are of the clock, from the command's start to its end; memory is the most that any of its processes had
resident, by the kernel. Nothing is read from what an earlier plan has remembered.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONFIG = """
from transformers import LlamaConfig


class Config(LlamaConfig):
    def __init__(self, **kwargs):
        super().__init__(**{{**{sizes!r}, **kwargs}})
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config's sizes and a cluster; `batch` in sequences of `length` tokens."""

    sizes: dict[str, int]
    cluster: str
    batch: int
    length: int = 8192


def _llama(hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }


CASES = {
    "llama-8b": Case(sizes=_llama(4096, 14336, 32, 32), cluster="2x8xH100-80G", batch=128),
    "llama-70b": Case(sizes=_llama(8192, 28672, 80, 64), cluster="16x8xH100-80G", batch=512),
    "llama-405b": Case(sizes=_llama(16384, 53248, 126, 128), cluster="256x8xH100-80G", batch=2048),
}


def command(case: Case, *, run_dir: Path) -> list[str]:
    """What a user would type in a folder with `sizes.py` in it."""
    return [
        *(sys.executable, "-m", "paceline", "plan", "sizes.py:Config", "--cluster", case.cluster),
        *("--train.precision=bf16", f"--train.global_batch_size={case.batch}", f"--job.length={case.length}"),
        *("--run-dir", str(run_dir)),
    ]


def measure(name: str) -> dict[str, Any]:
    """One plan in a folder of its own."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "sizes.py").write_text(_CONFIG.format(sizes=case.sizes), encoding="utf-8")
        began = time.monotonic()
        ran = subprocess.run(
            command(case, run_dir=home / "run"),
            cwd=home,
            env={**os.environ, "XDG_CACHE_HOME": str(home / "cache")},
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - began
        if ran.returncode:
            raise SystemExit(f"{name}: {ran.stdout}{ran.stderr}")
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10  # of all cases so far
    lines = [line for line in ran.stdout.splitlines() if "(replayed)" in line or line.startswith("recommended")]
    return {"name": name, "cluster": case.cluster, "seconds": seconds, "bytes": most, "lines": lines}


def told(found: dict[str, Any]) -> str:
    """The figures, then what was recommended and which rows were replayed."""
    head = f"{found['name']} on {found['cluster']}: {found['seconds']:.1f} s, at most {found['bytes'] / 2**30:.2f} GiB"
    return "\n".join([head, *(f"  {line.strip()}" for line in found["lines"])])


def main(words: Sequence[str] | None = None) -> int:
    """One case after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    said = []
    for name in asked.cases:
        said.append(told(measure(name)))
        print(said[-1], flush=True)
    if asked.out is not None:
        asked.out.write_text("\n".join(said) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
