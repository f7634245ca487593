"""Sites that train on their own, in a checkpoint and back: their mean as the model, and what each has of its own."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.place.holding import Holding
from paceline.step.local import LocalStep
from paceline.step.sites import Sites
from paceline.store.checkpoints import Loaded
from paceline.store.manifest import rank_file
from paceline.store.pieces import Stored
from paceline.store.tensors import Writable
from paceline.train.built import Built
from paceline.train.slices import own_pieces, read_part
from paceline.train.state import OPTIMIZER
from paceline.train.together import together

OUTER, OWN = "outer.safetensors", "weights.safetensors"
_ITS_OWN = ("optimizers", "schedules", "scaler", "extra_state")

Files = dict[str, list[Writable]]


def sites_of(built: Built) -> Sites | None:
    """Where there are several."""
    return built.step.sites if isinstance(built.step, LocalStep) else None


def mean_in_place(built: Built) -> AbstractContextManager[dict[str, Tensor]]:
    """What is evaluated, saved and handed over: the mean of the sites. Gives what this site has itself."""
    sites = sites_of(built)
    return nullcontext({}) if sites is None else sites.together()


def is_writer(built: Built) -> bool:
    """Whether this rank's site is the one that writes what all have alike."""
    sites = sites_of(built)
    return sites is None or sites.number == 0


def site_files(
    built: Built, files: Files, state: dict[str, Any], own: Mapping[str, Tensor]
) -> tuple[Files, dict[str, Any]]:
    """This rank's files and the JSON beside them, where there are sites. Every rank calls this."""
    sites = sites_of(built)
    if sites is None:
        return files, state
    found = files if sites.number == 0 else {}
    rank = built.site.rank
    stem = OPTIMIZER.partition(".")[0]
    found = found | {_of(sites.number, name): rows for name, rows in files.items() if name.startswith(stem)}
    found[_of(sites.number, rank_file(OWN, rank))] = [
        row for name, tensor in own.items() for row in _pieces(built, name, name, tensor)
    ]
    if sites.number == 0:
        rows = [
            row
            for fragment in sites.fragments
            for what, name, tensor in fragment.saved()
            for row in _pieces(built, f"{what}/{name}", name, tensor)
        ]
        found[rank_file(OUTER, rank)] = rows
    each = sites.peers.gather_json({name: state[name] for name in _ITS_OWN})
    due = [fragment.due for fragment in sites.fragments]
    return {name: rows for name, rows in found.items() if rows}, state | {"sites": each, "due": due}


def of_site(loaded: Loaded, built: Built, *, is_same: bool) -> Loaded:
    """A checkpoint as this rank's site is to see it; after another rule (not `is_same`) all begin as one."""
    sites = sites_of(built)
    if sites is None or not is_same:
        return loaded
    prefix = _of(sites.number, "")
    files = {name.removeprefix(prefix): stored for name, stored in loaded.files.items() if name.startswith(prefix)}
    return replace(loaded, files=loaded.files | files, state=loaded.state | loaded.state["sites"][sites.number])


def load_sites(loaded: Loaded, built: Built, *, is_same: bool) -> None:
    """This site's own weights, and what all have agreed on. Every rank calls this.

    Raises:
        CheckpointError: a tensor is not what was written.
    """
    sites = sites_of(built)
    if sites is None:
        return
    if not is_same:
        sites.begin()
        return
    stored = loaded.files.get(OWN, Stored([]))
    own = together(built.site, lambda: {name: _read(stored, name, name, built) for name in stored})
    sites.restore({name: tensor for name, tensor in own.items() if tensor is not None}, step=loaded.step)
    outer = loaded.files.get(OUTER, Stored([]))

    def find(what: str, name: str) -> Tensor | None:
        return _read(outer, f"{what}/{name}", name, built)

    def restore() -> None:
        for fragment, due in zip(sites.fragments, loaded.state["due"], strict=True):
            fragment.restore(find, due=due)

    together(built.site, restore)


def _of(site: int, name: str) -> str:
    return f"site-{site}.{name}"


def _pieces(built: Built, key: str, name: str, tensor: Tensor) -> Iterator[Writable]:
    parts = _holding(built, name).parts(name)
    yield from own_pieces(
        key, dtype=tensor.dtype, find=partial(Tensor.detach, tensor), parts=parts, rank=built.site.rank
    )


def _read(stored: Stored, key: str, name: str, built: Built) -> Tensor | None:
    part = _holding(built, name).mine[name].part
    return None if key not in stored or part.local is None else read_part(stored, key, part=part)


def _holding(built: Built, name: str) -> Holding:
    """Of what the optimizer holds, its share; else what the model does."""
    return built.kept if name in built.kept.mine else built.weights
