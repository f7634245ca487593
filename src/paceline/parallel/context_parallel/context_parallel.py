"""Context parallelism: a sequence sharded over the ranks of a `cp` axis, with the model's forward unchanged.

Create one `ContextParallel` for a model. Its method `shard` returns this rank's shard of a batch. Run the model on the
shard inside the context that `forward(batch_shard)` returns. The loss of a shard is a pair `(sum, count)`. The training
step adds sums, counts and gradients over all data-parallel ranks and all `cp` ranks.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.context_parallel.function_mode import ContextParallelMode
from paceline.parallel.context_parallel.sequence_sharding import (
    SequenceSharding,
    batch_length,
    count_sequences,
    has_padding,
    shard_batch,
)
from paceline.torch_internals.private_api import NormBase

_POSITIONS, _MASK, _LABELS, _SHIFTED_LABELS = "position_ids", "attention_mask", "labels", "shift_labels"


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """A rank's shard of one batch.

    `data` is the batch with its tensors sharded. `has_padding` is True if the attention mask of the full batch masks at
    least one position. `num_sequences` is the batch size.
    """

    data: Any
    sharding: SequenceSharding
    has_padding: bool
    num_sequences: int = 1


class ContextParallel:
    """Context parallelism of one model over a `cp` axis, whose ranks form `world`.

    `sequence` maps the name of a batch entry to its sequence dimension. `is_model_loss` is True if the loss is the
    model's `output.loss`. If the model then shifts the labels by one position, `shard` does this over the full sequence
    before it shards the batch. In training, `shard` calls `check_length(batch, length)` with each full batch.

    Raises:
        LayoutError: the model has a layer or a setting that does not support context parallelism.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        sequence: Mapping[str, int],
        world: World | None = None,
        is_model_loss: bool = False,
        check_length: Callable[[Any, int], None] | None = None,
    ) -> None:
        self._world = world or World.alone()
        self._model, self._sequence = model, dict(sequence)
        self.should_shift_labels = is_model_loss and loss_shifts_labels(model)
        self._last_mode: ContextParallelMode | None = None
        self._check_length = check_length
        if self._world.world_size > 1:
            refuse_model(model)

    def shard(self, batch: Any) -> BatchShard:
        """Return this rank's shard of the full batch; with `should_shift_labels`, shift the labels first."""
        world = self._world
        sharding = SequenceSharding(length=batch_length(batch, sequence=self._sequence), ranks=world.world_size)
        if world.world_size == 1:
            return BatchShard(data=batch, sharding=sharding, has_padding=False)
        refuse_window(self._model, length=sharding.length)
        if self._check_length is not None and self._model.training:
            self._check_length(batch, sharding.length)
        data = shard_batch(
            batch,
            sequence=self._sequence,
            ranks=world.world_size,
            rank=world.rank,
            shift_labels=self.should_shift_labels,
        )
        return BatchShard(
            data=data,
            sharding=sharding,
            has_padding=has_padding(batch),
            num_sequences=count_sequences(batch, sequence=self._sequence),
        )

    @contextmanager
    def forward(self, batch_shard: BatchShard) -> Iterator[None]:
        """Return a context in which the model runs on this shard."""
        if self._world.world_size == 1:
            yield
            return
        mode = self._build_mode(batch_shard)
        hook = _argument_hook(self._model, self._world, batch_shard.sharding)
        handle = self._model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            with mode:
                self._last_mode = mode
                yield
        finally:
            handle.remove()

    @contextmanager
    def backward(self, batch_shard: BatchShard) -> Iterator[None]:
        """Return a context for the backward of this shard, in which recomputed forwards also run on the shard."""
        if self._world.world_size == 1:
            yield
            return
        with self._build_mode(batch_shard, is_recompute=True):
            yield

    def _build_mode(self, batch_shard: BatchShard, *, is_recompute: bool = False) -> ContextParallelMode:
        return ContextParallelMode(
            world=self._world,
            sharding=batch_shard.sharding,
            model=self._model,
            should_replace_positions=_POSITIONS not in inspect.signature(self._model.forward).parameters,
            has_padding=batch_shard.has_padding,
            num_sequences=batch_shard.num_sequences,
            is_recompute=is_recompute,
        )

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[Any]]:
        """Return the contexts of a checkpointed forward and of its recomputation in backward.

        Pass this method as `context_fn` to `torch.utils.checkpoint.checkpoint`. The recomputation then runs in the same
        mode as the last `forward` context.
        """
        return nullcontext(), self._last_mode if self._last_mode is not None else nullcontext()

    def gather(self, output: Tensor, *, batch_shard: BatchShard, dim: int = 1) -> Tensor:
        """Return the full output, without gradient, of an output sharded along `dim`. A collective call."""
        world, dim = self._world, dim % output.dim()
        sizes = [batch_shard.sharding.local_length(rank) for rank in range(world.world_size)]
        shapes = [tuple(size if d == dim else n for d, n in enumerate(output.shape)) for size in sizes]
        return batch_shard.sharding.join(world.all_gather(output.detach(), shapes=shapes), dim=dim)


def _argument_hook(model: nn.Module, world: World, sharding: SequenceSharding) -> Any:
    """Return a forward pre-hook that adds the arguments which a forward on a shard needs.

    The hook adds positions if the forward accepts them and the call omits them. With the positions it adds a mask of
    ones, because without a mask transformers interprets gaps between positions as packed documents. If the model's loss
    shifts labels, the hook also passes `labels` as `shift_labels`, so that the model does not shift them. With
    `should_shift_labels`, `shard` has already shifted them. Without it, the labels are not shifted at all, and
    `output.loss` is wrong. But then the job has a loss of its own, and a job whose loss uses `output.loss` is refused.
    The hook acts in the thread that calls this function only, since other threads may run other shards.
    """
    thread = threading.get_ident()
    forward_parameters = inspect.signature(model.forward).parameters
    names = [name for name in forward_parameters if name != "self"]
    should_pass_labels = loss_shifts_labels(model)

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return None
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = next((value for value in arguments.values() if isinstance(value, Tensor) and value.dim() > 1), None)
        added: dict[str, Any] = {}
        if _POSITIONS in forward_parameters and arguments.get(_POSITIONS) is None and tokens is not None:
            added[_POSITIONS] = sharding.positions(world.rank, device=tokens.device)[None]
            if _MASK in forward_parameters and arguments.get(_MASK) is None:
                added[_MASK] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        if should_pass_labels and arguments.get(_LABELS) is not None and arguments.get(_SHIFTED_LABELS) is None:
            added[_SHIFTED_LABELS] = arguments[_LABELS]
        num_positional = min([len(args), *(names.index(name) for name in added if name in names)])
        by_keyword = dict(zip(names[num_positional:], args[num_positional:], strict=False))
        return args[:num_positional], {**by_keyword, **kwargs, **added}

    return hook


def loss_shifts_labels(model: nn.Module) -> bool:
    """Return True if the model's own loss shifts the labels by one position, as transformers' causal losses do."""
    loss = getattr(model, "loss_function", None)
    return callable(loss) and _SHIFTED_LABELS in inspect.signature(loss).parameters


def refuse_model(model: nn.Module) -> None:
    """Refuse a model with a layer or a setting that does not support context parallelism.

    Raises:
        LayoutError: the model has this kind of layer or setting; the message gives its name and the reason.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise _unsupported_layer_error(
                name, module, "each position depends on the one before it", "--layout fsdp, tp or pp"
            )
        if isinstance(module, NormBase) and getattr(module, "track_running_stats", False):
            raise _unsupported_layer_error(
                name, module, "its statistics cover the whole sequence", "nn.LayerNorm, or leave cp out"
            )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise LayoutError(
            f"{type(model).__name__} has two sequences, an encoder's and a decoder's.",
            cause="in its cross-attention, queries and keys come from different sequences; a ring covers one sequence",
            hint="leave cp out: --layout fsdp, or tp",
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa"):
        has_sdpa = bool(getattr(model, "_supports_sdpa", True))
        raise LayoutError(
            f"{type(model).__name__} uses {attention!r} attention; cp needs sdpa.",
            cause="the ring replaces F.scaled_dot_product_attention"
            + ("" if has_sdpa else ", which transformers does not offer for this model"),
            hint='model.set_attn_implementation("sdpa"), or attn_implementation="sdpa" when it is built'
            if has_sdpa
            else "leave cp out: --layout fsdp, or tp if it can be split",
        )


def refuse_window(model: nn.Module, *, length: int) -> None:
    """Raise if the model's attention window is shorter than the sequence.

    Raises:
        LayoutError: the window is shorter; the message names the setting.
    """
    config = getattr(model, "config", None)
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window < length and getattr(config, "use_sliding_window", True):
        raise LayoutError(
            f"sliding_window={window} is shorter than the sequence of {length}.",
            cause="a rank with one part of the sequence does not know where another part's window ends",
            hint="config.sliding_window = None, sequences up to the window, or leave cp out",
        )


def _unsupported_layer_error(name: str, module: nn.Module, reason: str, hint: str) -> LayoutError:
    return LayoutError(f"{name} ({type(module).__name__}) can't be split along the sequence: {reason}.", hint=hint)
