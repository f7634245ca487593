"""Options of other tools, and their equivalents here."""

from dataclasses import dataclass

from paceline.console.formatting import closest_word

_ALL_RANKS = "it counts the samples of one step over all ranks and microbatches"
_ONE_RANK = "it counts the samples of one rank in one forward"
_ONE_MACHINE = "paceline starts the processes of one machine and joins those that torchrun, srun or mpirun start"
_TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m paceline train JOB"
_OPTIMIZER = "the job builds the optimizer: make its values parameters of make_job"


@dataclass(frozen=True, kw_only=True)
class OtherOption:
    """The equivalent of another tool's option: what to type, with `{}` for its value, and why it differs."""

    to_type: str
    why: str = ""


def _same(to_type: str, *names: str, why: str = "") -> dict[str, OtherOption]:
    return dict.fromkeys(names, OtherOption(to_type=to_type, why=why))


FOREIGN: dict[str, OtherOption] = {
    **_same("--train.epochs {}", "epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs"),
    **_same("--train.steps {}", "steps", "max_steps", "num_steps", "max_train_steps", "iterations", "max_iters"),
    **_same("--train.tokens {}", "tokens", "max_tokens", "train_tokens"),
    **_same("--train.global_batch_size {}", "batch_size", "global_batch_size", "train_batch_size", why=_ALL_RANKS),
    **_same(
        "--train.micro_batch_size {}",
        "micro_batch_size", "per_device_train_batch_size", "local_batch_size", "train_micro_batch_size_per_gpu",
        why=_ONE_RANK,
    ),
    **_same("--eval.batch_size {}", "eval_batch_size", "per_device_eval_batch_size"),
    **_same(
        "--train.gradient_accumulation_steps {}",
        "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "accumulation_steps", "accum_steps",
    ),
    **_same("--train.max_grad_norm {}", "max_grad_norm", "gradient_clip_val", "clip_grad", "grad_clip", "max_norm"),
    **_same("--train.precision {}", "precision", "mixed_precision", "dtype", why="fp32, bf16 or fp16"),
    **_same("--train.precision bf16", "bf16", "amp"),
    **_same("--train.precision fp16", "fp16", "half"),
    **_same("--train.compile", "compile", "torch_compile"),
    **_same("--train.backend {}", "backend", "dist_backend", "ddp_backend"),
    **_same("--job.lr {}", "lr", "learning_rate", why=_OPTIMIZER),
    **_same("--job.weight_decay {}", "weight_decay", "wd", why=_OPTIMIZER),
    **_same("--job.warmup {}", "warmup", "warmup_steps", "num_warmup_steps", "warmup_ratio", why=_OPTIMIZER),
    **_same("--data.workers {}", "num_workers", "workers", "dataloader_num_workers"),
    **_same("--eval.every {}", "eval_every", "eval_steps", "val_check_interval", "eval_interval", why="in steps"),
    **_same("--log.every {}", "log_every", "logging_steps", "log_every_n_steps", "log_interval", why="in steps"),
    **_same("--checkpoint.every {}", "save_every", "save_steps", "checkpoint_every", "save_interval", why="in steps"),
    **_same("--checkpoint.keep {}", "save_total_limit", "save_top_k"),
    **_same("--watch.to {}", "report_to", "log_with", "logger", why="console, jsonl, tensorboard, wandb"),
    **_same("--watch.to console,jsonl,wandb", "wandb", "use_wandb"),
    **_same(
        "--run-dir {}", "output_dir", "out_dir", "save_dir", "log_dir", "logdir", "checkpoint_dir", "default_root_dir"
    ),
    **_same("--resume {}", "resume_from_checkpoint", "resume_from", "ckpt_path", "checkpoint_path", "load"),
    **_same("--config {}", "config_file", "cfg"),
    **_same("--device {}", "accelerator", why="auto, cpu or cuda"),
    **_same("--device cpu", "cpu", "no_cuda", "use_cpu"),
    **_same(
        "--ranks {}",
        "nproc", "num_processes", "gpus", "num_gpus", "n_gpus", "ngpus", "gpus_per_node", "world_size", "np",
    ),
    **_same(_TORCHRUN, "nnodes", "nodes", "num_nodes", "num_machines", "node_rank", "machine_rank", why=_ONE_MACHINE),
    **_same(
        _TORCHRUN,
        "master_addr", "master_port", "main_process_ip", "main_process_port", "rdzv_endpoint", "rdzv_backend",
        why=_ONE_MACHINE,
    ),
    **_same("leave --local-rank out", "local_rank", why="torchrun sets it in the environment"),
    **_same("--layout fsdp", "fsdp", "use_fsdp", "zero_stage"),
    **_same("--layout zero2, or fsdp", "deepspeed", "deepspeed_config", why="ZeRO is a layout"),
    **_same("--layout tp={}", "tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
    **_same("--layout pp={}", "pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    **_same("--layout cp={}", "cp", "context_parallel_size", "sequence_parallel_size"),
    **_same("--layout ep={}", "ep", "expert_parallel_size"),
    **_same("--layout dp={}", "dp", "data_parallel_size"),
    **_same("--layout ddp,remat=full", "gradient_checkpointing", "activation_checkpointing", "recompute"),
    **_same("--layout ddp,offload=optimizer", "cpu_offload", "offload"),
    **_same("--train.exact", "exact", "deterministic"),
    **_same("--train.timeout_seconds {}", "timeout", "ddp_timeout"),
}  # fmt: skip


def place_of(flag: str, value: str) -> tuple[str, str] | None:
    """Return the likely cause and what to type for an option of another tool; None for an unknown one.

    `flag` is as typed, `--per-device-train-batch-size`; `value` is what follows it, or empty.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    place = (
        FOREIGN.get(name)
        or FOREIGN.get(f"{name}s")
        or FOREIGN.get(closest_word(name, FOREIGN) if len(name) > 5 else "")
    )
    if place is None:
        return None
    return place.why or "Paceline uses another name", place.to_type.replace("{}", value or "N")
