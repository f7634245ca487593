"""Loss terms, as one number for backward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def weighed(terms: Mapping[str, tuple[Tensor, Any]], known: Mapping[str, float] | None) -> Tensor:
    """What backward runs on: the only sum, or the quotients with the joint counts."""
    if known is None:
        (total, _), *rest = terms.values()
        if rest:
            raise ValueError("several terms without counts")
        return total
    parts = [value / known[name] for name, (value, _) in terms.items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]
