"""A job whose gradients are large for its computation, so that the link decides which layout is the best."""

LINK_BOUND_JOB = """
import torch, torch.nn.functional as F, paceline as pl

def make_job(width: int = 512, depth: int = 8) -> pl.Job:
    data = torch.utils.data.TensorDataset(torch.randn(512, width), torch.randn(512, width))
    return pl.Job(
        model=lambda: torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)]
        ),
        loss=lambda output, batch: (F.mse_loss(output, batch[1], reduction="sum"), output.numel()),
        train_data=data,
        optimizer=lambda named_parameters: torch.optim.AdamW(named_parameters, lr=1e-4),
        global_batch_size=256,
    )
"""
