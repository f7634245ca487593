"""The modules of a foreign script: the script never says which model an optimizer trains, so they are looked up."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.script_check.recording import UNKNOWN_PARAMETER
from paceline.verification.fingerprints.record import strip_wrapper_names

_MAX_DEPTH = 16  # of wrappers around a model
_WRAPPED = ("_orig_mod", "_forward_module", "_fsdp_wrapped_module")
"""The names of the inner module in torch.compile, Fabric and FSDP1."""
_LIGHTNING = "LightningModule"


@dataclass(frozen=True, kw_only=True)
class TrainedModules:
    """The outermost modules that have parameters of an optimizer, and the names of these parameters by their id."""

    outermost: tuple[nn.Module, ...]
    names: dict[int, str]

    @property
    def wrappers(self) -> tuple[str, ...]:
        """The classes around the models, such as DistributedDataParallel."""
        found = {type(module).__name__ for top in self.outermost for module in _wrapper_chain(top)[:-1]}
        return tuple(sorted(found | ({"FSDPModule"} if self.sharding == "fsdp" else set())))

    @property
    def sharding(self) -> str:
        """Return how the weights are split; see `StepLine.sharding`."""
        if not any(hasattr(p, "placements") for top in self.outermost for p in top.parameters()):
            return ""
        classes = {c.__name__ for top in self.outermost for module in top.modules() for c in type(module).__mro__}
        return "fsdp" if "FSDPModule" in classes else "tensor"

    @property
    def framework(self) -> str:
        """The framework that runs the loop: `Lightning`, or "" if it is unknown."""
        classes = {c.__name__ for top in self.outermost for module in top.modules() for c in type(module).__mro__}
        return "Lightning" if _LIGHTNING in classes else ""

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """The batch norms that see only the batch of their rank."""
        return tuple(
            sorted(
                strip_wrapper_names(name)
                for top in self.outermost
                for name, module in top.named_modules()
                if isinstance(module, nn.modules.batchnorm._BatchNorm)
                and not isinstance(module, nn.SyncBatchNorm)
                and module.training
                and module.track_running_stats
            )
        )


def find_trained_modules(parameters: Sequence[Tensor]) -> TrainedModules:
    """Look up the modules that have some of the parameters among all living objects."""
    order = {id(p): place for place, p in enumerate(parameters)}
    modules = _living(nn.Module)
    inner = {id(child) for module in modules for child in module.children()}
    tops = []
    for module in modules:
        if id(module) not in inner:
            places = [order[id(p)] for p in module.parameters() if id(p) in order]
            if places:
                tops.append((min(places), -len(places), module))
    outermost = tuple(module for _, _, module in sorted(tops, key=lambda top: top[:2]))
    return TrainedModules(outermost=outermost, names=_names(outermost, order))


def find_loss_scalers() -> list[Any]:
    """Return the living loss scalers that are switched on."""
    return [each for each in _living(GradScaler) if each.is_enabled()]


def find_schedulers(optimizer: Optimizer) -> list[Any]:
    """Return the learning rate schedulers of an optimizer, in the order in which they were made."""
    return [each for each in _living(LRScheduler) if getattr(each, "optimizer", None) is optimizer]


def inactive_modules(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the dropout and BatchNorm modules that are in eval mode."""
    return tuple(
        f"{strip_wrapper_names(name)} ({type(each).__name__})".strip()
        for name, each in module.named_modules()
        if not each.training
        and (
            (isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0)
            or (isinstance(each, nn.modules.batchnorm._BatchNorm) and each.track_running_stats)
        )
    )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as DistributedDataParallel and a compiled module."""
    return _wrapper_chain(module)[-1]


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module or a part of it runs in `torch.compile`."""
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in module.modules())


def _wrapper_chain(module: nn.Module) -> Sequence[nn.Module]:
    """Return a module, the one that it wraps, and so on; the last one wraps none."""
    chain = [module]
    for _ in range(_MAX_DEPTH):
        children = dict(chain[-1].named_children())
        inner = (children[name] for name in _WRAPPED if name in children)
        wrapped = next(inner, children.get("module") if len(children) == 1 else None)
        if wrapped is None:
            break
        chain.append(wrapped)
    return chain


def _living(cls: type) -> list[Any]:
    return [found for found in gc.get_objects() if issubclass(type(found), cls)]


def _names(outermost: Sequence[nn.Module], order: dict[int, int]) -> dict[int, str]:
    """Return unique names: that of the module's class is added where two modules have the same one."""
    names: dict[int, str] = {}
    for top in outermost:
        for full_name, p in top.named_parameters():
            if id(p) in order and id(p) not in names:
                name = strip_wrapper_names(full_name)
                while name in names.values():
                    name = f"{type(unwrap(top)).__name__}:{name}"
                names[id(p)] = name
    return names | {key: f"{UNKNOWN_PARAMETER}{place}" for key, place in order.items() if key not in names}
