"""A function mode that runs a model's own forward on a shard of a sequence.

The mode replaces the functions that depend on the full sequence. `F.scaled_dot_product_attention` becomes ring
attention. `torch.arange(length of the shard)` returns the positions of the shard, and `table[:, :length of the shard]`
of a parameter or buffer returns the rows of these positions. A convolution along the sequence reads the neighbouring
positions from other ranks, also after an `F.pad`. Dropout draws a mask for the full sequence and applies this rank's
shard of the mask. All other functions are unchanged. Most of them treat each position separately; `check_context`
detects those that do not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.context_parallel.attention_mask import InterpretedMask, interpret_mask
from paceline.parallel.context_parallel.multihead_attention import multi_head_attention
from paceline.parallel.context_parallel.ring_attention import Ring, ring_attention
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding
from paceline.parallel.tensor_parallel.rules.matmul import compute_sharded_attention
from paceline.parallel.tensor_parallel.sharded_tensor import NoRule, ShardPropagatingTensor
from paceline.parallel.tensor_parallel.sharding import slice_shard
from paceline.torch_internals.function_signatures import bind_arguments

MAX_RANDOM_NUMBERS = 2**30
_CONVOLUTIONS = (torch.conv1d, F.conv1d)


class ContextParallelMode(TorchFunctionMode):
    """The function mode of a forward on a shard of the sequence.

    `should_replace_positions` is False if the model gets its positions as an argument. `has_padding` is True if at
    least one rank has a masked key. `num_sequences` is the batch size, for models that flatten (batch, sequence) to
    one dimension. With `is_recompute`, the mode is active during backward. It then changes only the recomputed
    forwards, which it recognises because gradients are enabled in them.
    """

    def __init__(
        self,
        *,
        world: World,
        sharding: SequenceSharding,
        model: nn.Module,
        should_replace_positions: bool = True,
        has_padding: bool = False,
        num_sequences: int = 1,
        is_recompute: bool = False,
    ) -> None:
        super().__init__()
        self._world, self._sharding, self._is_recompute = world, sharding, is_recompute
        self._has_padding, self._num_sequences = has_padding, num_sequences
        self._local_length = sharding.local_length(world.rank)
        # tuples of the mask, the arguments `is_causal` and `batch`, and the result
        self._interpreted_masks: list[tuple[Any, ...]] = []
        # by the id of a padded tensor: a reference to it, the tensor before padding, and the padding left and right
        self._padded_tensors: dict[int, tuple[ref[Tensor], Tensor, int, int]] = {}
        self._table_ids = _find_table_ids(model) if should_replace_positions else set()
        self._replacements: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            F.multi_head_attention_forward: partial(multi_head_attention, attention=self._attention),
            F.pad: self._pad,
            F.dropout: self._dropout,
            **dict.fromkeys(_CONVOLUTIONS, self._convolution),
        }
        if should_replace_positions:
            self._replacements |= {torch.arange: self._arange, Tensor.__getitem__: self._index_table}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Compute this rank's shard of the result on the full sequence, or call the function unchanged."""
        replacement = self._replacements.get(func)
        if replacement is None or self._world.world_size == 1 or (self._is_recompute and not torch.is_grad_enabled()):
            return func(*args, **(kwargs or {}))
        result = replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    @override
    def __exit__(self, *error: Any) -> None:
        """Exit the mode, and release all tensors of this forward."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._interpreted_masks.clear()
        self._padded_tensors.clear()

    # -- attention

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        """Compute ring attention; under tensor parallelism, for this rank's heads only."""
        return compute_sharded_attention(self._ring_attention, args, kwargs)

    def _ring_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sharded_query: ShardPropagatingTensor | None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _refuse_other_lengths(query, key, self._local_length)
        leading_shape = query.shape[:-2]
        query, key, value = (
            t.reshape(-1, t.shape[-3] if t.dim() > 2 else 1, *t.shape[-2:]) for t in (query, key, value)
        )
        batch, num_heads = query.shape[:2]
        group_size = num_heads // key.shape[1] if enable_gqa else 1
        if group_size > 1 and self._has_padding:
            # On a rank that has padding, transformers itself has already repeated the key heads. Ranks without padding
            # repeat them here, because the ring needs equal shapes on all ranks.
            key, value = (t.repeat_interleave(group_size, 1) for t in (key, value))
            group_size = 1
        key, value = (t.expand(batch, num_heads // group_size, *t.shape[-2:]) for t in (key, value))
        interpreted_mask = self._interpret_mask(attn_mask, is_causal, batch)
        key_mask = interpreted_mask.key_mask
        if key_mask is None and (self._has_padding or attn_mask is not None):  # other ranks may have padding
            key_mask = torch.ones(batch, self._local_length, dtype=torch.uint8, device=query.device)
        ring = Ring(
            dropout=dropout_p,
            world=self._world,
            sharding=self._sharding,
            is_causal=interpreted_mask.is_causal,
            scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else scale,
        )
        dropout_mask = self._draw_dropout_mask(query, dropout_p, sharded_query)
        grouped_query = query.reshape(batch, num_heads // group_size, group_size, *query.shape[-2:])
        output = ring_attention(grouped_query, key, value, key_mask=key_mask, dropout_mask=dropout_mask, ring=ring)
        return torch.reshape(output, (*leading_shape, self._local_length, value.shape[-1]))

    def _draw_dropout_mask(
        self, query: Tensor, p: float, sharded_query: ShardPropagatingTensor | None
    ) -> Tensor | None:
        """Draw the dropout mask of all attention weights, as one process does, and return this rank's part of it.

        The part has this rank's queries and, under tensor parallelism, its heads. If the rate `p` is 0, it is None.
        """
        if p == 0.0:
            return None
        if sharded_query is not None and sharded_query.sharding.dim != len(sharded_query.full_shape) - 3:
            raise NoRule  # the samples are sharded, not the heads
        batch, length = query.shape[0], self._sharding.length
        num_heads = query.shape[1] if sharded_query is None else sharded_query.full_shape[-3]
        shape = (batch, num_heads, length, length)
        if math.prod(shape) > MAX_RANDOM_NUMBERS:
            raise LayoutError(
                f"attention dropout of {p:g} needs {math.prod(shape):,} random numbers on every rank, "
                f"more than {MAX_RANDOM_NUMBERS:,}.",
                cause="to match one process, each rank draws for the whole sequence and keeps its rows",
                hint="attention dropout 0: config.attention_dropout = 0.0 (attention_probs_dropout_prob, attn_pdrop), "
                "or dropout_p=0.0 in the call",
            )
        full_mask = F.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), p, True)
        local_mask = self._sharding.shard(full_mask != 0, dim=2, rank=self._world.rank)
        if sharded_query is None:
            return local_mask
        return slice_shard(local_mask, sharded_query.sharding.with_dim(1), sharded_query.group.rank)

    def _interpret_mask(self, mask: Tensor | None, is_causal: bool, batch: int) -> InterpretedMask:
        """Return the meaning of a mask; it is cached for one forward, because the layers of a model share a mask."""
        for cached_mask, *key, interpreted_mask in self._interpreted_masks:
            if cached_mask is mask and key == [is_causal, batch]:
                return interpreted_mask  # type: ignore[no-any-return]
        interpreted_mask = interpret_mask(mask, is_causal=is_causal, batch=batch, length=self._local_length)
        self._interpreted_masks.append((mask, is_causal, batch, interpreted_mask))
        return interpreted_mask

    # -- positions

    def _arange(self, *args: Any, **kwargs: Any) -> Any:
        """Return the shard's positions for a range over the shard's length; NotImplemented for other ranges."""
        range_arguments: dict[str, Any] = {name: kwargs[name] for name in ("start", "end", "step") if name in kwargs}
        bounds = bind_arguments("arange", args, range_arguments) or {}
        numbers = (bounds.get("start", 0), bounds.get("end"), bounds.get("step", 1))
        are_integers = all(isinstance(number, int) for number in numbers)  # arange(6.0) returns floats
        if numbers != (0, self._local_length, 1) or not are_integers or kwargs.get("out") is not None:
            return NotImplemented
        positions = self._sharding.positions(self._world.rank)
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        return positions.to(device=device or torch.get_default_device(), dtype=dtype or torch.int64)

    def _index_table(self, tensor: Tensor, index: Any) -> Any:
        """Return the rows of a position table at the shard's positions, if `index` is a slice up to the shard's length.

        Return NotImplemented for other tensors and indices.
        """
        local = _local_tensor(tensor)
        if not isinstance(local, nn.Parameter) and id(local) not in self._table_ids:
            return NotImplemented
        indices = index if isinstance(index, tuple) else (index,)
        length, local_length = self._sharding.length, self._local_length
        dims = [d for d, x in enumerate(indices) if _is_prefix(x, local_length) and tensor.shape[d] >= length]
        if len(dims) != 1 or any(not isinstance(x, slice) for x in indices[: dims[0]]):
            return NotImplemented
        positions = self._sharding.positions(self._world.rank, device=tensor.device)
        other_indices = tuple(slice(None) if d == dims[0] else x for d, x in enumerate(indices))
        return tensor.index_select(dims[0], positions)[other_indices]

    # -- neighbours

    def _pad(self, input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
        """Pad as usual, and record a sequence before its padding, for a convolution that follows."""
        padded = F.pad(input, pad, mode, value)
        is_sequence = input.dim() == 3 and input.shape[-1] == self._local_length
        if is_sequence and len(pad) == 2 and min(pad) >= 0 and mode == "constant" and not value:
            self._padded_tensors[id(padded)] = (ref(padded), input, int(pad[0]), int(pad[1]))
        return padded

    def _convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        """Gather the full sequence, and convolve the positions of this rank's chunks.

        Return NotImplemented if the convolution is not along the sequence, or if its output has another length.
        """
        stride, dilation = _single_int(stride), _single_int(dilation)
        halo = dilation * (weight.shape[-1] - 1)
        unpadded, left, right = self._unpadded_input(input)
        unpadded = unpadded.full_tensor() if isinstance(unpadded, ShardPropagatingTensor) else unpadded
        extra = halo // 2 if padding == "same" else 0 if padding == "valid" else _single_int(padding)
        left, right = left + extra, right + (halo - halo // 2 if padding == "same" else extra)
        if halo == 0 or stride != 1 or unpadded.shape[-1] != self._local_length or left + right != halo:
            return NotImplemented
        full_input = F.pad(gather_sequence(unpadded, dim=-1, world=self._world, sharding=self._sharding), (left, right))
        chunks = self._sharding.chunks(self._world.rank)
        inputs = [full_input[..., chunk.start : chunk.stop + halo].contiguous() for chunk in chunks]
        return torch.cat([F.conv1d(x, weight, bias, 1, 0, dilation, groups) for x in inputs], dim=-1)

    def _unpadded_input(self, tensor: Tensor) -> tuple[Tensor, int, int]:
        """Return the tensor before `_pad`, and the padding left and right; an unpadded tensor itself with (0, 0)."""
        padded, source, left, right = self._padded_tensors.get(id(tensor), (None, tensor, 0, 0))
        return (source, left, right) if padded is not None and padded() is tensor else (tensor, 0, 0)

    # -- dropout

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Apply this rank's shard of a dropout mask that is drawn for the full sequence, as in one process."""
        layout = self._sequence_layout(input)
        if not training or p == 0.0 or layout is None:
            return NotImplemented
        dim, num_sequences = layout
        shape = list(input.shape)
        shape[dim] = num_sequences * self._sharding.length
        full_mask = F.dropout(_ones_in_layout(shape, layout_like=input), p, True).unflatten(dim, (num_sequences, -1))
        mask = self._sharding.shard(full_mask, dim=dim + 1, rank=self._world.rank).flatten(dim, dim + 1)
        return input.mul_(mask) if inplace else input * mask

    def _sequence_layout(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the sequence dimension, and how many sequences are flattened into it; None without this dimension."""
        dims = [d for d in (1, *range(tensor.dim())) if d < tensor.dim() and tensor.shape[d] == self._local_length]
        flat_length = self._num_sequences * self._local_length
        is_flat = self._num_sequences > 1 and tensor.dim() > 0 and tensor.shape[0] == flat_length
        if is_flat and (tensor.dim() == 2 or 1 not in dims):
            return 0, self._num_sequences
        return (dims[0], 1) if dims and tensor.dim() > 1 else None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, shard: Tensor, dim: int, world: World, sharding: SequenceSharding) -> Tensor:
        ctx.gather_arguments = dim, world, sharding
        sizes = [sharding.local_length(rank) for rank in range(world.world_size)]
        shapes = [tuple(size if d == dim else n for d, n in enumerate(shard.shape)) for size in sizes]
        return sharding.join(world.all_gather(shard, shapes=shapes), dim=dim)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        dim, world, sharding = ctx.gather_arguments
        full_gradient = world.all_reduce(grads[0].clone(memory_format=torch.contiguous_format))
        return sharding.shard(full_gradient, dim=dim, rank=world.rank), None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_sequence(shard: Tensor, *, dim: int, world: World, sharding: SequenceSharding) -> Tensor:
    """Return the full sequence on every rank; backward sums its gradient over the ranks and returns the shard's."""
    return _GatherSequence.apply(shard, dim % shard.dim(), world, sharding)  # type: ignore[no-untyped-call,no-any-return]


def _ones_in_layout(shape: Sequence[int], *, layout_like: Tensor) -> Tensor:
    """Return ones with the order of strides of `layout_like`, because dropout draws its mask in memory order."""
    strides = torch.empty_like(_local_tensor(layout_like)).stride()
    memory_order = sorted(range(layout_like.dim()), key=lambda d: -strides[d])
    ones = torch.ones([shape[d] for d in memory_order], dtype=layout_like.dtype, device=layout_like.device)
    return ones.permute([memory_order.index(d) for d in range(layout_like.dim())])


def _local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a sharded tensor, or the tensor itself."""
    return tensor.local if isinstance(tensor, ShardPropagatingTensor) else tensor


def _find_table_ids(model: nn.Module) -> set[int]:
    """Return the ids of the model's buffers and tensor attributes, which may be position tables.

    Parameters may be tables too. They are recognised by their type, because `fully_shard` replaces them in the forward.
    """
    attributes = [value for module in model.modules() for value in vars(module).values()]
    return {id(tensor) for tensor in (*model.buffers(), *attributes) if isinstance(tensor, Tensor)}


def _is_prefix(index: Any, length: int) -> bool:
    """Return whether an index is the slice `[:length]`."""
    return isinstance(index, slice) and index.start in (None, 0) and index.step in (None, 1) and index.stop == length


def _single_int(value: Any) -> int:
    """Return a number, or the number in a tuple or list of one."""
    return int(value[0] if isinstance(value, tuple | list) else value)


def _refuse_other_lengths(query: Tensor, key: Tensor, local_length: int) -> None:
    """Raise LayoutError if an attention has another number of queries or keys than the shard has positions."""
    if query.shape[-2] != local_length or key.shape[-2] != local_length:
        raise LayoutError(
            f"an attention has {query.shape[-2]} queries and {key.shape[-2]} keys but this rank's part of the "
            f"sequence has {local_length}.",
            cause="cross-attention, a cache, extra tokens (a class token), or attention over another dimension",
            hint="leave cp out; use_cache=False if it is a cache",
        )
