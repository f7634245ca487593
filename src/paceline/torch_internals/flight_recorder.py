"""The flight recorder of torch, which knows the collectives of a process that have not completed, whoever started them.

torch records the last collectives and messages of gloo and NCCL, with their sizes and states. The functions that read
the records are private: `torch._C._distributed_c10d._dump_fr_trace_json` (gloo) and `_dump_nccl_trace_json`. Tested on
torch 2.11 to 2.13.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch

_MAX_SIZES = 3
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def unfinished_collectives() -> list[str]:
    """Return the collectives and messages that this process has started and that have not completed, the oldest first.

    Each is a text such as "all_reduce of [1024] float, number 12 in its group". The list is empty if torch records
    nothing (`TORCH_FR_BUFFER_SIZE=0`).
    """
    c10d = getattr(torch._C, "_distributed_c10d", None)
    dumps = [dump for name in _DUMPS if (dump := getattr(c10d, name, None)) is not None]
    return [text for dump in dumps for text in _describe(json.loads(dump(True, True)).get("entries", ()))]


def _describe(entries: Iterable[Any]) -> list[str]:
    """Return a text for each entry of the recorder that has not completed."""
    texts = []
    for entry in entries:
        if entry.get("state") == "completed" or entry.get("retired"):  # gloo sets only the latter
            continue
        name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
        sizes = [str(size) for size in entry.get("input_sizes") or entry.get("output_sizes") or ()]
        types = {str(kind).lower() for kind in entry.get("input_dtypes") or entry.get("output_dtypes") or ()}
        if len(sizes) > _MAX_SIZES:
            sizes = [*sizes[:_MAX_SIZES], f"{len(sizes) - _MAX_SIZES} more"]
        content = f" of {' and '.join(sizes)} {' and '.join(sorted(types))}" if sizes else ""
        number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
        texts.append(f"{name}{content}, number {number} in its group")
    return texts
