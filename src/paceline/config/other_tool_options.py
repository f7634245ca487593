"""Map the options of other training tools to their equivalents in Paceline."""

from dataclasses import dataclass

_ALL_RANKS = "it counts the samples of one step over all ranks and microbatches"
_ONE_RANK = "it counts the samples of one rank in one forward"
_PRECISION = "the precision is fp32, bf16 or fp16"
_STEPS = "it is a number of steps"
_SINKS = "the sinks are console, jsonl, tensorboard and wandb"
_RESTARTS = "Paceline counts the restarts in a row, without a new checkpoint in between"
_OPTIMIZER = "the job builds the optimizer: make its values parameters of make_job"


@dataclass(frozen=True, kw_only=True)
class OtherOption:
    """The equivalent of another tool's option: what to type, with `{}` for the value, and why the options differ."""

    replacement: str
    reason: str = ""


def _row(replacement: str, *names: str, reason: str = "") -> dict[str, OtherOption]:
    return dict.fromkeys(names, OtherOption(replacement=replacement, reason=reason))


OTHER_TOOL_OPTIONS: dict[str, OtherOption] = {
    **_row("--train.epochs {}", "epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs"),
    **_row("--train.steps {}", "steps", "max_steps", "num_steps", "max_train_steps", "iterations", "max_iters"),
    **_row("--train.tokens {}", "tokens", "max_tokens", "train_tokens"),
    **_row("--train.global_batch_size {}", "batch_size", "global_batch_size", "train_batch_size", reason=_ALL_RANKS),
    **_row(
        "--train.micro_batch_size {}",
        "micro_batch_size", "per_device_train_batch_size", "local_batch_size", "train_micro_batch_size_per_gpu",
        reason=_ONE_RANK,
    ),
    **_row("--eval.batch_size {}", "eval_batch_size", "per_device_eval_batch_size"),
    **_row(
        "--train.gradient_accumulation_steps {}",
        "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "accumulation_steps", "accum_steps",
    ),
    **_row("--train.max_grad_norm {}", "max_grad_norm", "gradient_clip_val", "clip_grad", "grad_clip", "max_norm"),
    **_row("--train.precision {}", "precision", "mixed_precision", "dtype", reason=_PRECISION),
    **_row("--train.precision bf16", "bf16", "amp"),
    **_row("--train.precision fp16", "fp16", "half"),
    **_row("--train.compile", "compile", "torch_compile"),
    **_row("--train.backend {}", "backend", "dist_backend", "ddp_backend"),
    **_row("--job.lr {}", "lr", "learning_rate", reason=_OPTIMIZER),
    **_row("--job.weight_decay {}", "weight_decay", "wd", reason=_OPTIMIZER),
    **_row("--job.warmup {}", "warmup", "warmup_steps", "num_warmup_steps", "warmup_ratio", reason=_OPTIMIZER),
    **_row("--data.workers {}", "num_workers", "workers", "dataloader_num_workers"),
    **_row("--eval.every {}", "eval_every", "eval_steps", "val_check_interval", "eval_interval", reason=_STEPS),
    **_row("--log.every {}", "log_every", "logging_steps", "log_every_n_steps", "log_interval", reason=_STEPS),
    **_row("--checkpoint.every {}", "save_every", "save_steps", "checkpoint_every", "save_interval", reason=_STEPS),
    **_row("--checkpoint.background", "async_save", "async_mode", "async_checkpointing"),
    **_row("--checkpoint.keep {}", "save_total_limit", "save_top_k"),
    **_row("--watch.to {}", "report_to", "log_with", "logger", reason=_SINKS),
    **_row("--watch.to console,jsonl,wandb", "wandb", "use_wandb"),
    **_row(
        "--run-dir {}", "output_dir", "out_dir", "save_dir", "log_dir", "logdir", "checkpoint_dir", "default_root_dir"
    ),
    **_row("--resume {}", "resume_from_checkpoint", "resume_from", "ckpt_path", "checkpoint_path", "load"),
    **_row("--config {}", "config_file", "cfg"),
    **_row("--device {}", "accelerator", reason="the device is auto, cpu or cuda"),
    **_row("--device cpu", "cpu", "no_cuda", "use_cpu"),
    **_row("leave --local-rank out", "local_rank", reason="torchrun sets it in the environment"),
    **_row("--layout fsdp", "fsdp", "use_fsdp", "zero_stage"),
    **_row("--layout zero2, or fsdp", "deepspeed", "deepspeed_config", reason="ZeRO is a layout"),
    **_row("--layout tp={}", "tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
    **_row("--layout pp={}", "pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    **_row("--layout cp={}", "cp", "context_parallel_size", "sequence_parallel_size"),
    **_row("--layout ep={}", "ep", "expert_parallel_size"),
    **_row("--layout dp={}", "dp", "data_parallel_size"),
    **_row("--layout ddp,remat=full", "gradient_checkpointing", "activation_checkpointing", "recompute"),
    **_row("--layout fsdp,offload=optimizer", "cpu_offload", "offload"),
    **_row("--train.exact", "exact", "deterministic"),
    **_row("--train.timeout_seconds {}", "timeout", "ddp_timeout"),
    **_row("--survive.restarts {}", "max_restarts", "restarts", "max_failures", reason=_RESTARTS),
}  # fmt: skip


def find_equivalent(flag: str, value: str) -> tuple[str, str] | None:
    """Return the likely cause and what to type instead of another tool's option; None if the option is unknown.

    `flag` is the option as typed, such as `--per-device-train-batch-size`, and `value` its value, or empty.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    option = OTHER_TOOL_OPTIONS.get(name) or OTHER_TOOL_OPTIONS.get(f"{name}s")
    if option is None:
        return None
    return option.reason or "Paceline uses another name", option.replacement.replace("{}", value or "N")
