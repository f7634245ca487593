"""A published run as the planner sees it: its model, its cluster, its layout, and what it does that we do not.

What a row does not say is taken as its framework had it by itself, and stands here, not in the constants:

- Megatron, NeMo and llm-foundry join what is elementwise in kernels of their own; so does a compiler.
- Before 2023 attention wrote its scores (no flash attention).
- The residual stream is in 16 bits; fsdp gathers in 16 bits and adds up in float32.
- Under a pipeline torch adds gradients up once a step, so sharded gradients count as ZeRO-1 there.
- torchtitan's choice by operations runs every second product again: of a gated block keys, output and one of three of
  the MLP; in float8 all of them, since those are not on its list.
- Llama-3 405B's schedule is taken as interleaved with two layers a stage, MT-NLG's as 1f1b.
"""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layer_cost import LayerCost, LayerPlacement, layer_cost
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.catalog import DEVICES, LINKS, catalog_cluster
from paceline.planner.hardware.cluster import Cluster, Group
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.model_profile import ZERO, BatchScaling, LayerProfile, ModelProfile

Row = dict[str, Any]
_FOUND = tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
_MEGATRON = ("korthikanti-2022", "narayanan-2021", "mt-nlg-2022")
_JOINED = (*_MEGATRON, "nemo-2511", "llm-foundry", "llama3-2024")
_ROCE = {"torchtitan-2024": "roce-400g", "torchtitan-async-tp": "roce-400g", "llama3-2024": "roce-400g"}
_NODE = 8
_OF_UNKNOWN = {"llama3-2024": ("interleaved", 4), "mt-nlg-2022": ("1f1b", 1)}


def read_rows() -> list[Row]:
    """In the order of the file."""
    return list(_FOUND["runs"])


def step_seconds(row: Row, efficiency: Efficiency) -> float:
    """As forecast."""
    made = forecast_of(row, efficiency)
    return made.seconds(made.candidate).step_seconds


def their_seconds(row: Row) -> float:
    """Of one step, as published: from speed or from FLOPs by the source's own way to count them."""
    tokens, value = row["global_batch"] * row["length"], row["value"]
    if row["figure"] == "step_seconds":
        return float(value)
    if row["figure"] == "tokens_per_second_per_device":
        return float(tokens / row["devices"] / value)
    model = _FOUND["models"][row["model"]]
    layers, hidden, length, vocabulary = model["layers"], model["hidden"], row["length"], model["vocab"]
    if row["source"] in _MEGATRON:  # Narayanan et al., 2021, appendix: scores of all pairs, four passes with one again
        passes = 4 if row["figure"] == "hardware_tflops_per_device" else 3
        each = 1 + length / (6 * hidden) + vocabulary / (16 if passes == 4 else 12) / layers / hidden
        flops = passes * 24.0 * tokens * layers * hidden**2 * each
    else:
        facts = _facts(row["model"], length, row["global_batch"], row["precision"], row["source"], row["compile"])
        flops = 3 * sum(part.flops.evaluate(samples=1, length=length) for part in facts.parts) * row["global_batch"]
    rate = value * 312e12 if row["figure"] == "mfu" else value * 1e12
    return float(flops / row["devices"] / rate)


@cache
def _facts(name: str, length: int, batch: int, precision: str, source: str, is_compiled: bool) -> ModelProfile:
    model = _FOUND["models"][name]
    sizes = Decoder(
        layers=model["layers"], width=model["hidden"], mlp_width=model["ffn"], heads=model["heads"],
        kv_heads=model["kv_heads"], vocabulary=model["vocab"], is_gated=model["ffn_products"] == 3,
        is_tied=model["tied"], has_dropout=source in _MEGATRON,
    )  # fmt: skip
    return build_decoder_profile(
        sizes, name=name, length=length, global_batch_size=batch, precision=precision, residual_bytes=2,
        is_fused=is_compiled or source in _JOINED, is_flash=source not in _MEGATRON,
    )  # fmt: skip


def _fleet(row: Row) -> Cluster:
    """Eight a host. Tensor cores do twice as many operations in 8 bits as in 16."""
    name, nodes = row["device"], max(1, row["devices"] // _NODE)
    entry = DEVICES["H100-80G" if name == "H100-96G-500W" else name]
    device = entry.device
    if name == "H100-96G-500W":
        device = replace(device, name=name, memory_bytes=96 * 2**30, bytes_per_second=2.4e12, watts=500.0)
    rates = {**device.flops_per_second, "float8": 2 * device.flops_per_second["bf16"]}
    link = _ROCE.get(row["source"])
    fleet = catalog_cluster(
        entry, nodes=nodes, devices=min(_NODE, row["devices"]), between=LINKS[link] if link else None
    )
    return replace(fleet, device=replace(device, flops_per_second=rates))


def _candidate(row: Row) -> Candidate:
    pp, zero = row["pp"], row["zero"]
    schedule, virtual = row.get("schedule", "1f1b"), row.get("virtual", 1)
    if "schedule" in row.get("unknown", ()):
        schedule, virtual = _OF_UNKNOWN[row["source"]]
    zero = 1 if zero == 2 and pp > 1 else zero
    return Candidate(
        pp=pp, tp=row["tp"], cp=row["cp"], zero=zero, schedule=schedule, virtual=virtual,
        dp_shard=row["dp"] if zero else 1, dp_replicate=1 if zero else row["dp"],
        micro_batch_size=row["micro_batch"], precision=row["precision"], params="bf16" if zero == 3 else "fp32",
        sequence=bool(row.get("sequence_parallel", row["tp"] > 1)),
        remat={"full": "full", "operations": "selective"}.get(row["recompute"], "none"),
    )  # fmt: skip


class Published(CostModel):
    """Of a row, with what its framework does beside what ours does."""

    def __init__(self, row: Row, efficiency: Efficiency) -> None:
        facts = _facts(
            row["model"], row["length"], row["global_batch"], row["precision"], row["source"], row["compile"]
        )
        super().__init__(profile=facts, cluster=_fleet(row), efficiency=efficiency)
        self.row = row
        self.candidate = _candidate(row)

    def layer_costs(self, candidate: Candidate) -> tuple[LayerCost, ...]:
        """Of each part, with what runs again and what hides messages as in the row."""
        found = super().layer_costs(candidate)
        return (
            *found[:2],
            *(self._theirs(work, part) for work, part in zip(found[2:], self.chain.parts[2:], strict=True)),
        )

    def _theirs(self, work: LayerCost, part: LayerProfile) -> LayerCost:
        row, again = self.row, 0.0
        if row["recompute"] == "attention":
            scores = replace(part, matmul_flops=ZERO, moved_bytes=BatchScaling(pair=part.moved_bytes.pair))
            again = self._forward(scores)
        elif row["recompute"] == "operations":
            products = self._forward(replace(part, attention_flops=ZERO, moved_bytes=ZERO))
            again = products * (1.0 if row["precision"] == "float8" else self._second)
        work = replace(
            work,
            recompute=work.recompute + again,
            overlappable_seconds=(work.overlappable_seconds[0], work.overlappable_seconds[1] + again),
        )
        return self._hidden(work) if row.get("async_tp") else work

    @property
    def _second(self) -> float:
        """Of a gated block's products, every second one."""
        model = _FOUND["models"][self.row["model"]]
        hidden, keys, ffn = model["hidden"], model["hidden"] // model["heads"] * model["kv_heads"], model["ffn"]
        return float((keys + hidden + ffn) / (2 * hidden + 2 * keys + 3 * ffn))

    def _forward(self, part: LayerProfile) -> float:
        c = self.candidate
        alone = replace(self.efficiency, part_seconds=0.0)
        split = LayerPlacement(
            samples=c.micro_batch_size, length=self.profile.length, precision=c.precision, sequence=c.sequence,
            remat="none", tp=Group(size=c.tp), cp=Group(size=c.cp), ep=Group(size=c.ep),
        )  # fmt: skip
        return layer_cost(part, is_block=True, placement=split, device=self.cluster.device, efficiency=alone).forward

    def _hidden(self, work: LayerCost) -> LayerCost:
        """Messages of tp behind the products next to them (asynchronous tensor parallelism)."""
        there, back = work.messages_forward - work.context / 2, work.messages_backward - work.context / 2
        left = [
            max(0.0, sent - self.efficiency.overlap * hides)
            for sent, hides in zip((there, back), work.overlappable_seconds, strict=True)
        ]
        return replace(
            work, tensor=sum(left), messages_forward=work.messages_forward - there + left[0],
            messages_backward=work.messages_backward - back + left[1],
        )  # fmt: skip


def forecast_of(row: Row, efficiency: Efficiency) -> Published:
    """With its layout as `candidate`."""
    return Published(row, efficiency)
