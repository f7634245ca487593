"""Search for a model's chain of repeated blocks, the units of pipeline stages, remat, compilation and sharding."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError

_LISTS = nn.ModuleList | nn.Sequential


class NoChain(LayoutError):
    """The error for a model whose blocks form no chain; the model may still be split along its exported graph."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of the model under its FQN; `index` is its position in the result of `find_blocks`."""

    index: int
    name: str
    module: nn.Module


def find_blocks(model: nn.Module, *, listed_names: Sequence[str] | None = None) -> tuple[Block, ...]:
    """Return the model's blocks in registration order, or the modules in `listed_names`, in that order.

    A block is an entry of an outermost `nn.ModuleList` or `nn.Sequential` in which a class with submodules occurs at
    least twice: decoder layers, encoder layers followed by decoder layers, the stages of a ResNet. If there is no such
    list, the blocks are the entries of the list with the most parameters, even if their classes differ. The result
    depends only on the model's structure, so it is the same on every rank.

    Raises:
        NoChain: the model has no list with two entries that hold parameters.
        LayoutError: a listed name is no module, is listed twice, or is inside another listed module.
    """
    if listed_names is not None:
        return _find_listed(model, listed_names)
    block_lists = list(_outermost_lists(model, ""))
    chosen = [(name, entries) for name, entries in block_lists if _has_repeated_class(entries)] or _largest_list(
        block_lists
    )
    blocks = [(f"{name}.{key}".lstrip("."), child) for name, entries in chosen for key, child in _entries(entries)]
    return tuple(Block(index=index, name=name, module=child) for index, (name, child) in enumerate(blocks))


def has_blocks(model: nn.Module) -> bool:
    """Return whether `find_blocks` finds a chain."""
    block_lists = list(_outermost_lists(model, ""))
    return any(_has_repeated_class(entries) for _, entries in block_lists) or bool(_lists_with_parameters(block_lists))


def _find_listed(model: nn.Module, names: Sequence[str]) -> tuple[Block, ...]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules:
            raise LayoutError(
                f"place.blocks lists {name!r}, but the model has no module of that name.",
                cause=did_you_mean(name, modules),
                hint="the names that model.named_modules() gives",
            )
        enclosing = next((other for other in names if name.startswith(f"{other}.")), None)
        if enclosing is not None or list(names).count(name) > 1:
            raise LayoutError(
                f"place.blocks lists {name!r} "
                + ("twice." if enclosing is None else f"and {enclosing!r}, which contains it."),
                cause="each block is a separate module, and no block contains another",
                hint="list each module once, in the order in which the forward calls them",
            )
    return tuple(Block(index=index, name=name, module=modules[name]) for index, name in enumerate(names))


def _outermost_lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the lists that are not inside a list with a repeated class; other lists are searched for inner lists."""
    if isinstance(module, _LISTS) and len(module) > 1:
        yield name, module
        if _has_repeated_class(module):
            return
    for key, child in module.named_children():
        yield from _outermost_lists(child, f"{name}.{key}".lstrip("."))


def _entries(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return each entry with its key; a module that is registered twice appears twice, because it is called twice."""
    return [(key, child) for key, child in module._modules.items() if child is not None]


def _has_repeated_class(module: nn.Module) -> bool:
    class_counts = Counter(type(child) for _, child in _entries(module) if _is_composite(child))
    return any(count > 1 for count in class_counts.values())


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _lists_with_parameters(lists: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the lists with at least two entries that hold parameters."""
    return [
        (name, entries)
        for name, entries in lists
        if sum(next(child.parameters(), None) is not None for _, child in _entries(entries)) > 1
    ]


def _largest_list(lists: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    candidates = _lists_with_parameters(lists)
    if not candidates:
        raise NoChain(
            "no chain of blocks: no nn.ModuleList or nn.Sequential has two entries that hold parameters.",
            cause="layers stored as separate attributes (self.layer1, ...), or one layer used repeatedly",
            hint="name the layers in the order of the forward: --place.blocks layer1,layer2",
        )
    return [max(candidates, key=lambda pair: sum(p.numel() for p in pair[1].parameters()))]
