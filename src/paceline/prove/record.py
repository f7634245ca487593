"""`pl.record`: two lines in anybody's loop that write fingerprints of each step."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.feed.stream import checksum
from paceline.prove.prints import Print, fingerprint

_INSIDE = ("_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Recorder:
    """Writes one line a step: fingerprints of gradients as the optimizer sees them, and of weights after it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, path: str | Path, *, every: int = 1) -> None:
        rank = int(os.environ.get("RANK", 0))
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._named = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
        self._every = every
        self._step = 0
        self._batch: int | None = None
        self._gradients: dict[str, Print] = {}
        self._hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def batch(self, batch: Any) -> None:
        """Note what this rank is about to train on, so that data order is compared too."""
        self._batch = checksum(batch, self._batch or 0)

    def close(self) -> None:
        """Remove the hooks and close the file."""
        for hook in self._hooks:
            hook.remove()
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before(self, *_: object) -> None:
        self._step += 1
        if self._is_due():
            self._gradients = {name: print_of(p.grad) for name, p in self._named if p.grad is not None}

    def _after(self, *_: object) -> None:
        if not self._is_due():
            return
        weights = {name: print_of(p.detach()) for name, p in self._named}
        line = {
            "step": self._step,
            "batch": self._batch,
            "gradients": _plain(self._gradients),
            "weights": _plain(weights),
        }
        os.write(self._handle, (json.dumps(line) + "\n").encode())
        self._batch = None

    def _is_due(self) -> bool:
        return (self._step - 1) % self._every == 0


def record(model: nn.Module, optimizer: Optimizer, path: str | Path, *, every: int = 1) -> Recorder:
    """Write fingerprints of every step of any loop to the folder `path`; compare with `paceline compare A B`."""
    return Recorder(model, optimizer, path, every=every)


def print_of(tensor: Tensor) -> Print:
    """The fingerprint of a tensor on any device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return fingerprint(flat.double().numpy(), raw=memoryview(raw))


def plain_name(name: str) -> str:
    """The FQN without what wrappers put in front."""
    parts = [part for part in name.split(".") if part not in _INSIDE]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _plain(prints: Mapping[str, Print]) -> dict[str, list[Any]]:
    return {name: value.as_json() for name, value in prints.items()}
