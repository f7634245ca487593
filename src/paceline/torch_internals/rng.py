"""Random streams keyed by their purpose, so that no rank, worker or restart changes a draw."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.torch_internals.private_api import is_in_backward


def stream_key(*parts: int | str) -> int:
    """Return a 63-bit key that is a pure function of `parts`, equal on all processes, machines and versions."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int) -> None:
    """Seed torch's CPU generator, and that of the current GPU if CUDA is initialised."""
    torch.default_generator.manual_seed(seed)
    _seed_gpu(seed)


def _seed_gpu(seed: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    seed_torch(seed)


def cpu_rng_states() -> tuple[object, ...]:
    """Return the states of the CPU's three generators; two results are equal if nothing was drawn between the calls."""
    numpy_state: Any = np.random.get_state(legacy=False)
    key, position = numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"]
    return random.getstate(), key, position, torch.get_rng_state().numpy().tobytes()


def python_rng_states() -> dict[str, object]:
    """Return the states of the generators of `random` and `numpy.random`, by module name."""
    numpy_state: Any = np.random.get_state(legacy=False)
    key, position = numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"]
    return {"random": random.getstate(), "numpy.random": (key, position)}


def get_rng_states(gpu: torch.device | None = None) -> tuple[Any, ...]:
    """Return the states of the generators of Python, NumPy, torch and a GPU, for `set_rng_states`."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return (*states, None if gpu is None else torch.cuda.get_rng_state(gpu))


def set_rng_states(states: tuple[Any, ...], gpu: torch.device | None = None) -> None:
    """Restore the states of the generators."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if gpu is not None:
        torch.cuda.set_rng_state(states[3], gpu)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the generators of Python, NumPy, torch and the current GPU when the context exits."""
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
    states = get_rng_states(gpu)
    try:
        yield
    finally:
        set_rng_states(states, gpu)


class BlockCallCounter:
    """A counter of the calls of each block within one microbatch: each call of a block has its own random stream.

    A forward that backward recomputes (activation checkpointing) gets the number of the original call. Recomputation
    restores the generator, whose seed identifies the original call. Checkpointing that does not restore the generator
    (`preserve_rng_state=False`) is correct only for blocks that are called once.
    """

    def __init__(self) -> None:
        self._call_numbers: dict[int, dict[int, int]] = {}  # by block, then by the generator's seed at the call

    def clear(self) -> None:
        """Reset the counts for the next microbatch."""
        self._call_numbers.clear()

    def call_number(self, block: int, *, is_gpu_only: bool = False) -> int:
        """Return the number of this call of the block, from 0."""
        seed = torch.cuda.initial_seed() if is_gpu_only else torch.default_generator.initial_seed()
        call_numbers = self._call_numbers.setdefault(block, {})
        return call_numbers.get(seed, 0) if is_in_backward() else call_numbers.setdefault(seed, len(call_numbers))


def block_key(microbatch: int, *, block: int, call: int) -> int:
    """Return the seed of one call of one random block; `microbatch` is the key of the microbatch's stream."""
    mixed = (microbatch ^ (0x9E37_79B9_7F4A_7C15 * (block + 1))) + 0xD1B5_4A32_D192_ED03 * call
    return mixed & 0x7FFF_FFFF_FFFF_FFFF


class RandomStreams:
    """The random streams of one run: one per (seed, step, microbatch), and within it one per random block.

    Random blocks are the repeated layers with dropout. Each starts its own stream, so that a pipeline stage draws the
    same numbers as one process. All other operations draw from the microbatch's stream.

    `is_gpu_only`: the CPU's generators are not seeded, because several replicas share them and none draws from them.
    """

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._microbatch = 0
        self._call_counter = BlockCallCounter()
        self.is_gpu_only = False

    def enter(self, *, step: int, microbatch: int) -> None:
        """Start the stream of one microbatch; `microbatch` is its index in the global batch."""
        self._microbatch = stream_key(self._seed, step, microbatch)
        self._call_counter.clear()
        if self.is_gpu_only:
            _seed_gpu(self._microbatch)
        else:
            seed_all(self._microbatch)

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Install hooks that start a stream for each random block; return a function that removes them."""
        handles = [
            block.register_forward_pre_hook(self._seeding_hook(number))
            for number, block in enumerate(random_blocks(model))
        ]

        def remove_hooks() -> None:
            for handle in handles:
                handle.remove()

        return remove_hooks

    def _seeding_hook(self, block: int) -> Callable[[nn.Module, object], None]:
        def seed_block(module: nn.Module, _: object) -> None:
            if module.training:
                call = self._call_counter.call_number(block, is_gpu_only=self.is_gpu_only)
                (_seed_gpu if self.is_gpu_only else seed_torch)(block_key(self._microbatch, block=block, call=call))

        return seed_block


def random_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks with dropout, in the order in which the model registers them.

    The result depends only on the model's structure, so it is equal on every rank and after every restart.
    """
    dropout_blocks: list[nn.Module] = []
    inner_ids: set[int] = set()
    for module in model.modules():
        if id(module) in inner_ids or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds = [type(child) for child in module]
        blocks = [child for child in module if kinds.count(type(child)) > 1 and _has_dropout(child)]
        dropout_blocks += blocks
        inner_ids |= {id(part) for block in blocks for part in block.modules()}
    return dropout_blocks


class InitiallyZeroDropout:
    """The dropout modules whose rate was 0 when the model was split into stages.

    The split assumes that these modules draw no random numbers. A block in which all dropout rates are 0 does not start
    a random stream of its own, because this would change the random numbers that training in one process draws.
    """

    def __init__(self, model: nn.Module) -> None:
        self._zero_rates = [(m, name) for m in model.modules() for name, value in _dropout_rates(m) if value == 0]

    def has_positive_rate(self) -> bool:
        """Return whether one of these modules has a positive rate now."""
        return any(getattr(module, name, 0) for module, name in self._zero_rates)


def _has_dropout(block: nn.Module) -> bool:
    rates = [rate for module in block.modules() for _, rate in _dropout_rates(module)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _dropout_rates(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield a module's own dropout rates, by attribute name."""
    rates = [(name, value) for name, value in vars(module).items() if "drop" in name]
    rates += [("p", getattr(module, "p", None))] if "drop" in type(module).__name__.lower() else []
    yield from ((name, value) for name, value in rates if isinstance(value, int | float) and value is not False)
