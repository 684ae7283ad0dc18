"""A model of two layers on a machine with round speeds, and where its bytes may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from analyzer.inference.offload.machine import Machine
from analyzer.inference.offload.memory import limits, tiers
from analyzer.inference.offload.policy import Lengths, Placement, Schedule, Shares
from analyzer.inference.offload.tensors import sub_layers
from analyzer.inference.offload.work import Case
from analyzer.specs.model import ModelSpec

GPU_ONLY = Shares(1.0, 0.0, 0.0)
HOST_ONLY = Shares(0.0, 1.0, 0.0)
DISK_ONLY = Shares(0.0, 0.0, 1.0)
HIDDEN = 64
LAYERS = 2
MODEL = ModelSpec(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    ffn_hidden_size=4 * HIDDEN,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    vocab_size=128,
    padded_vocab_size=128,
    max_position_embeddings=32,
    position_embedding="learned_absolute",
)
MACHINE = Machine(
    gpu_memory=1e12,
    host_memory=1e12,
    disk_size=1e12,
    gemm=1e30,
    batched_gemm=1e30,
    hbm=1e30,
    cache_read=1e30,
    decompressed=1e30,
    compressed=1e30,
    pcie=1e30,
    pcie_from=1e30,
    staged=1e30,
    unstaged=1e30,
    cpu_attention=1e30,
    disk_read=1e30,
    disk_write=1e30,
    step=0.0,
)
"""All but infinitely fast; tests set the speeds that they are about."""


def small(schedule: Schedule, *, prompt: int = 8, generated: int = 4, **speeds: Any) -> Case:
    """The case of a schedule on a machine that is as slow as told."""
    return Case(
        model=MODEL,
        layers=sub_layers(MODEL),
        schedule=schedule,
        lengths=Lengths(prompt=prompt, generated=generated),
        machine=replace(MACHINE, **({"pcie_from": speeds["pcie"]} if "pcie" in speeds else {}) | speeds),
    )


def fits(case: Case, placement: Placement) -> bool:
    """Whether every tier has room for the bytes of a placement."""
    return all(size <= limit * (1 + 1e-9) for size, limit in zip(tiers(case).at(placement), limits(case.machine), strict=True))
