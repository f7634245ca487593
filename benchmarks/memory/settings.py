"""What is measured: every family under the layouts that it can have, and each way for a peak to come about.

Weights and optimizer against activations, a long sequence, wide logits, one more rank, smaller microbatches, another
precision, another optimizer; before them some that are large, and deep ones, of which a replay has few blocks.
`docs/matrix.md` says which layouts are refused.
"""

from typing import Any

from benchmarks.memory.measured import Setting


def settings() -> list[Setting]:
    """All of them, in the order in which they are run."""
    return [*_large(), *_deep(), *_on_four(), *_on_two(), *_alone()]


def _of(
    family: str, layout: str = "single", ranks: int = 1, *, job: dict[str, Any] | None = None, **more: Any
) -> Setting:
    return Setting(family=family, layout=layout, ranks=ranks, job=job or {}, **more)


def _alone() -> list[Setting]:
    plain = ("llama", "gpt2", "bert", "t5", "vit", "mixtral", "resnet", "unet", "lstm", "mlp", "nano", "encoder")
    return [
        *(_of(family) for family in plain if family != "resnet"),
        _of("resnet", optimizer="sgd"),
        _of("llama", batch=16),
        _of("llama", job={"depth": 8}),
        _of("llama", job={"length": 256}),
        _of("llama", job={"vocabulary": 16384}),
        _of("llama", micro=2),
        _of("llama", batch=1, job={"width": 512, "length": 32}),
        _of("llama", batch=1, optimizer="adamw_foreach", job={"width": 512, "length": 32}),
        _of("llama", precision="bf16"),
        _of("llama", optimizer="sgd"),
        _of("llama", "ddp,remat=full", batch=16),
        _of("gpt2", "ddp,remat=full", job={"depth": 6}),
        _of("bert", batch=16, job={"dropout": 0.0}),
        _of("vit", precision="bf16", batch=16),
        _of("t5", job={"length": 256}),
        _of("mixtral", batch=16, optimizer="sgd"),
        _of("resnet", batch=16, optimizer="adamw", job={"side": 64}),
        _of("resnet", optimizer="sgd", micro=4, job={"depth": 3}),
        _of("unet", precision="bf16"),
        _of("lstm", batch=32, optimizer="sgd"),
        _of("mlp", optimizer="adamw_foreach"),
        _of("mlp", batch=1024, optimizer="sgd", job={"depth": 12}),
        _of("nano", job={"length": 256, "dropout": 0.0}),
        _of("nano", "ddp,remat=full", job={"length": 256}),
        _of("encoder", precision="bf16"),
    ]


def _on_two() -> list[Setting]:
    whole = {
        "llama": ("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp"),
        "gpt2": ("ddp", "zero1", "fsdp", "tp", "pp", "cp"),
        "bert": ("zero2", "fsdp", "tp", "cp"),
        "t5": ("fsdp", "tp", "pp"),
        "vit": ("fsdp", "tp", "pp"),
        "mixtral": ("ddp", "fsdp", "ep", "tp", "pp"),
        "resnet": ("ddp", "zero1", "fsdp", "pp"),
        "unet": ("zero2", "fsdp"),
        "lstm": ("ddp", "fsdp"),
        "mlp": ("ddp", "zero1", "fsdp", "pp"),
        "nano": ("zero1", "fsdp", "tp", "pp"),
        "encoder": ("ddp", "zero2", "fsdp", "pp"),
    }
    return [
        *(_two(family, layout) for family, layouts in whole.items() for layout in layouts),
        _of("llama", "fsdp,remat=full", 2, batch=16),
        _of("llama", "fsdp", 2, precision="bf16"),
        _of("llama", "fsdp,params=bf16", 2, job={"depth": 6}),
        _of("llama", "ddp", 2, micro=2),
        _of("llama", "zero2", 2, micro=2),
        _of("llama", "fsdp", 2, batch=2, job={"width": 512, "length": 32}),
        _of("llama", "tp,sequence=true", 2),
        _of("llama", "pp,schedule=gpipe", 2, micro=1),
        _of("llama", "pp,schedule=zb_h1", 2, micro=1),
        _of("gpt2", "pp,schedule=interleaved_1f1b", 2, micro=2),
        _of("gpt2", "tp,remat=full", 2, batch=16),
        _of("mixtral", "dp_shard=2,ep=2", 2),
        _of("resnet", "ddp", 2, batch=16, optimizer="sgd", precision="bf16"),
    ]


def _two(family: str, layout: str) -> Setting:
    optimizer = "sgd" if family == "resnet" else "adamw"
    return _of(family, layout, 2, optimizer=optimizer, micro=2 if layout == "pp" else None)


def _on_four() -> list[Setting]:
    return [
        _of("llama", "ddp", 4),
        _of("llama", "fsdp", 4),
        _of("llama", "zero1", 4, optimizer="sgd"),
        _of("llama", "hsdp", 4),
        _of("llama", "dp_shard=2,tp=2", 4),
        _of("llama", "pp=2,dp_shard=2", 4, micro=1),
        _of("llama", "pp=2,tp=2", 4, micro=2),
        _of("gpt2", "dp_shard=2,tp=2", 4),
        _of("gpt2", "pp=2,dp_shard=2", 4, micro=1),
        _of("vit", "fsdp", 3, batch=12),
        _of("bert", "dp_shard=2,cp=2", 4),
        _of("mixtral", "dp_shard=4,ep=2", 4),
        _of("t5", "fsdp,remat=full", 4),
        _of("nano", "pp=4,schedule=gpipe", 4, micro=1),
        _of("mlp", "fsdp", 4, batch=64, job={"width": 2048}),
    ]


def _large() -> list[Setting]:
    """Each with more than 500 MiB of tensors alive on some rank."""
    return [
        _of("mlp", batch=16, job={"width": 3072, "depth": 5}),
        _of("llama", batch=8, job={"width": 512, "depth": 6, "length": 192}),
        _of("gpt2", batch=16, job={"length": 256, "vocabulary": 16384}),
        _of("nano", batch=8, job={"length": 512, "depth": 5}),
        _of("resnet", batch=32, optimizer="sgd", job={"side": 64, "width": 48}),
        _of("unet", batch=16, job={"side": 96}),
        _of("mlp", "ddp", 2, batch=16, job={"width": 2560, "depth": 5}),
        _of("mlp", "fsdp", 2, batch=16, job={"width": 4096, "depth": 5}),
        _of("nano", "fsdp", 2, batch=16, job={"length": 512}),
    ]


def _deep() -> list[Setting]:
    """Four times as deep as what a replay looks at, their blocks wide enough for that."""
    short: dict[str, Any] = {"length": 32, "depth": 16, "vocabulary": 512}
    return [
        _of("llama", batch=4, micro=2, job={**short, "width": 1280}),
        _of("gpt2", batch=4, micro=2, optimizer="sgd", job={**short, "width": 1088}),
        _of("bert", "ddp", 2, batch=8, micro=2, optimizer="sgd", job={**short, "width": 1088}),
        _of("nano", "zero1", 2, batch=8, micro=2, job={**short, "width": 1088}),
        _of("gpt2", "fsdp,remat=full", 2, batch=8, micro=2, job={**short, "width": 1088}),
        _of("llama", "fsdp", 2, batch=8, micro=2, job={**short, "width": 1280}),
        _of("mixtral", "zero2", 2, batch=8, micro=2, optimizer="sgd", job={**short, "width": 768}),
        _of("mlp", "ddp,remat=full", 2, batch=8, micro=2, optimizer="sgd", job={"width": 2176, "depth": 16}),
    ]
