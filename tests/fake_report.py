"""Synthetic reports for the tests of the output. They are built without an engine, and their parts add up by construction.

`small_report` has the sample layout of the 2023 proposal: 2 nodes of 8 GPUs, TP2 PP2 DP4, micro-batch size 4, global batch size
512, s = 2048, h = 4096. `large_report` has 126 layers on 16,384 GPUs: TP8 PP16 DP128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from analyzer.layout.stages import Chunk
from analyzer.modules.tree import Collective, Module, Parameter, Tensor
from analyzer.results import (
    Advice,
    CommunicationRow,
    CommunicationTotal,
    MemoryPart,
    PeakEvent,
    RankClass,
    RankMemory,
    Report,
    Verdict,
)
from analyzer.specs import (
    BatchSpec,
    HardwareSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    SoftwareSpec,
    TrainingFlags,
    TrainingJob,
)

GIB = 2**30
MIB = 2**20


def make_job(*, layers: int = 24, hidden: int = 4096, heads: int = 32, **parallel: Any) -> TrainingJob:
    """Return a bf16 job without recomputation. `parallel` overrides fields of its ParallelSpec."""
    sizes: dict[str, Any] = {"world_size": 16, "nodes": 2, "gpus_per_node": 8, "tensor": 2, "pipeline": 2, "expert_tensor": 2}
    spec = ParallelSpec(**(sizes | parallel))
    return TrainingJob(
        model=ModelSpec(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=4 * hidden,
            num_attention_heads=heads,
            num_query_groups=heads,
            kv_channels=hidden // heads,
            vocab_size=50257,
            padded_vocab_size=50432,
            max_position_embeddings=2048,
            position_embedding="learned_absolute",
        ),
        parallel=spec,
        batch=BatchSpec(
            micro_batch_size=4,
            global_batch_size=512,
            seq_length=2048,
            microbatches=512 // (4 * spec.data),
            first_microbatches=512 // (4 * spec.data),
        ),
        precision=PrecisionSpec(parameters="bf16", gradients="fp32"),
        optimizer=OptimizerSpec(),
        recompute=RecomputeSpec(),
        flags=TrainingFlags(),
        hardware=HardwareSpec(name="H100-80GB", capacity_bytes=80 * GIB),
        megatron="0.16.1",
        software=SoftwareSpec(te="2.11", torch="2.10"),
    )


def make_layer(*, hidden: int, t: int) -> Module:
    """Return a transformer layer: attention and MLP with two linear layers each, and their collectives."""
    wide = (2048, 4, hidden)

    def linear(name: str, rows: int, columns: int, phase: Any, *, bias: bool) -> Module:
        sends = Collective(kind="all_reduce", group="tp", shape=wide, dtype="bf16", phase=phase)
        shapes = [Parameter(name="weight", shape=(rows, columns), dtype="bf16", sharding="tensor")]
        shapes += [Parameter(name="bias", shape=(rows,), dtype="bf16")] if bias else []
        return Module(
            name=name,
            parameters=tuple(shapes),
            saved=(Tensor(name="input", shape=wide, dtype="bf16", formula="2·s·b·h"),),
            collectives=(sends,) if t > 1 else (),
            source="transformer_engine.pytorch.Linear",
        )

    attention = (
        linear("linear_qkv", 3 * hidden // t, hidden, "backward", bias=True),
        linear("linear_proj", hidden, hidden // t, "forward", bias=True),
    )
    mlp = (
        linear("linear_fc1", 4 * hidden // t, hidden, "backward", bias=True),
        linear("linear_fc2", hidden, 4 * hidden // t, "forward", bias=True),
    )
    return Module(name="layers", children=(Module(name="self_attention", children=attention), Module(name="mlp", children=mlp)))


def make_tree(*, layers: int, hidden: int, t: int, first: bool, last: bool) -> Module:
    """Return a chunk of the model. `t` is the tensor-parallel size."""
    table = Parameter(name="weight", shape=(50432 // t, hidden), dtype="bf16", sharding="tensor")
    embedding = Module(name="embedding", children=(Module(name="word_embeddings", parameters=(table,)),))
    norm = Module(name="final_layernorm", parameters=(Parameter(name="weight", shape=(hidden,), dtype="bf16"),))
    logits = Tensor(name="softmax", shape=(2048, 4, 50432 // t), dtype="fp32", formula="4·s·b·V/t")
    decoder = Module(name="decoder", children=(*([make_layer(hidden=hidden, t=t)] * layers), *((norm,) if last else ())))
    head = (Module(name="output_layer", saved=(logits,)),)
    return Module(name="gpt_model", children=(*((embedding,) if first else ()), decoder, *(head if last else ())))


def count(tree: Module) -> int:
    """Return the number of parameters of a tree."""
    return sum(p.numel for _, module in tree.walk() for p in module.parameters)


def make_memory(*, parameters: int, activations: int, in_flight: int) -> RankMemory:
    """Return memory whose parts add up. Model states are those of unsharded mixed-precision Adam."""
    transient = (MemoryPart(name="logits gradient", bytes=788 * MIB), MemoryPart(name="weight gradient", bytes=197 * MIB))
    runtime = (MemoryPart(name="cuBLAS workspace", bytes=32 * MIB), MemoryPart(name="attention mask", bytes=4 * MIB))
    runtime_bytes, transient_bytes = sum(p.bytes for p in runtime), sum(p.bytes for p in transient)
    allocated = (2 + 4 + 12) * parameters + runtime_bytes
    peak = allocated + activations + transient_bytes
    return RankMemory(
        parameters_bytes=2 * parameters,
        gradients_bytes=4 * parameters,
        optimizer_bytes=12 * parameters,
        runtime_bytes=runtime_bytes,
        allocated_bytes=allocated,
        activations_bytes=activations,
        transient_bytes=transient_bytes,
        peak_allocated_first_iteration_bytes=peak - 8 * parameters,
        peak_allocated_bytes=peak,
        peak_event=PeakEvent.BACKWARD,
        peak_in_first_iteration=False,
        peak_at="backward of microbatch 1, output_layer",
        peak_reserved_bytes=peak + 300 * MIB,
        device_bytes=peak + 300 * MIB + 1200 * MIB,
        device_range_bytes=(peak + 600 * MIB, peak + 2500 * MIB),
        runtime_parts=runtime,
        transient_parts=transient,
        microbatches_in_flight=(in_flight,),
    )


def make_rank(job: TrainingJob, stage: int) -> RankClass:
    """Return the rank class of a pipeline rank. Layers are distributed evenly; the last stages may have fewer."""
    p = job.parallel
    per_stage = -(-job.model.num_layers // p.pipeline)
    layers = tuple(range(stage * per_stage + 1, min((stage + 1) * per_stage, job.model.num_layers) + 1))
    first, last = stage == 0, stage == p.pipeline - 1
    tree = make_tree(layers=len(layers), hidden=job.model.hidden_size, t=p.tensor, first=first, last=last)
    ranks_per_stage = p.world_size // p.pipeline
    in_flight = min(p.pipeline - stage, job.batch.microbatches)
    kept = in_flight * len(layers) * 4 * 2 * 2048 * 4 * job.model.hidden_size
    return RankClass(
        ranks=((stage * ranks_per_stage, (stage + 1) * ranks_per_stage - 1),),
        pipeline_rank=stage,
        parameters=count(tree),
        parameters_routed_experts=0,
        chunks=(Chunk(virtual_stage=0, layers=layers, pre_process=first, post_process=last),),
        trees=(tree,),
        memory=make_memory(parameters=count(tree), activations=kept, in_flight=in_flight),
    )


def make_messages(job: TrainingJob) -> tuple[CommunicationRow, ...]:
    """Return the tensor-, pipeline- and data-parallel communication rows of every stage."""
    p, m, wide = job.parallel, job.batch.microbatches, (2048, 4, job.model.hidden_size)
    size = 2 * 2048 * 4 * job.model.hidden_size
    layers = job.model.num_layers // p.pipeline
    blank = CommunicationRow(
        group="tp",
        kind="all_reduce",
        phase="forward",
        module="",
        pipeline_rank=0,
        shape=wide,
        dtype="bf16",
        message_bytes=size,
        calls_per_microbatch=layers,
        calls_per_iteration=layers * m,
        bytes_per_iteration=layers * m * size,
    )
    rows: list[CommunicationRow] = []
    for stage in range(p.pipeline):
        for module, phase in (
            ("self_attention.linear_proj", "forward"),
            ("mlp.linear_fc2", "forward"),
            ("self_attention.linear_qkv", "backward"),
            ("mlp.linear_fc1", "backward"),
        ):
            rows.append(replace(blank, module=f"decoder.layers.{module}", phase=phase, pipeline_rank=stage))
        send = replace(
            blank,
            group="pp",
            kind="send",
            pipeline_rank=stage,
            calls_per_microbatch=1,
            calls_per_iteration=m,
            bytes_per_iteration=m * size,
        )
        if stage < p.pipeline - 1:
            rows.append(replace(send, phase="forward", peer="next"))
        if stage > 0:
            rows.append(replace(send, phase="backward", peer="previous"))
        gradients = 1_718_898_688
        rows.append(
            replace(
                blank,
                group="dp_cp",
                phase="gradient",
                module="gradient buffer",
                pipeline_rank=stage,
                shape=(gradients,),
                dtype="fp32",
                message_bytes=4 * gradients,
                calls_per_microbatch=0,
                calls_per_iteration=1,
                bytes_per_iteration=4 * gradients,
            )
        )
    return tuple(rows)


def make_groups(job: TrainingJob, *, limit: int) -> dict[str, tuple[Sequence[int], ...]]:
    """Return the groups of the rank order tp-dp-pp, at most `limit` of each kind."""
    p = job.parallel
    t, d, s = p.tensor, p.data, p.world_size // p.pipeline
    data = tuple(tuple(range(stage * s + i, (stage + 1) * s, t)) for stage in range(p.pipeline) for i in range(t))
    return {
        "tp": tuple(tuple(range(i * t, (i + 1) * t)) for i in range(p.world_size // t))[:limit],
        "pp": tuple(tuple(range(i, p.world_size, s)) for i in range(s))[:limit],
        "dp": data[:limit],
        "dp_cp": data[:limit],
        "edp": data[:limit],
        "embd": tuple((i, p.world_size - s + i) for i in range(s))[:limit],
        "cp": tuple((i,) for i in range(p.world_size))[:limit],
        "tp_dp": tuple(tuple(range(stage * t * d, (stage + 1) * t * d)) for stage in range(p.pipeline))[:limit],
    }


def make_report(job: TrainingJob, *, limit: int = 4096, advice: tuple[Advice, ...] = ()) -> Report:
    """Return the complete report of a job."""
    p = job.parallel
    full_model = make_tree(layers=job.model.num_layers, hidden=job.model.hidden_size, t=1, first=True, last=True)
    ranks = tuple(make_rank(job, stage) for stage in range(p.pipeline))
    highest = max(ranks, key=lambda each: each.memory.device_bytes)
    rows = make_messages(job)
    totals = {}
    for kind in ("tp", "pp", "dp_cp"):
        by_stage = [[row for row in rows if row.group == kind and row.pipeline_rank == stage] for stage in range(p.pipeline)]
        calls = [sum(row.calls_per_iteration for row in stage) for stage in by_stage]
        sizes = [sum(row.bytes_per_iteration for row in stage) for stage in by_stage]
        each = p.world_size // p.pipeline
        totals[kind] = CommunicationTotal(
            calls_per_iteration=max(calls),
            bytes_per_iteration=max(sizes),
            cluster_calls_per_iteration=each * sum(calls),
            cluster_bytes_per_iteration=each * sum(sizes),
        )
    capacity = job.hardware.capacity_bytes
    return Report(
        engine="formula",
        job=job,
        groups=make_groups(job, limit=limit),
        groups_truncated=p.world_size > 4096,
        group_counts={
            "tp": p.world_size // p.tensor,
            "pp": p.world_size // p.pipeline,
            "dp": p.tensor * p.pipeline,
            "dp_cp": p.tensor * p.pipeline,
            "edp": p.tensor * p.pipeline,
            "embd": p.world_size // p.pipeline,
            "cp": p.world_size,
            "tp_dp": p.pipeline,
        },
        full_model=full_model,
        parameters=count(full_model),
        parameters_unpadded=count(full_model) - (50432 - 50257) * job.model.hidden_size,
        parameters_active=count(full_model),
        parameters_adapters=0,
        parameters_routed_experts=0,
        ranks=ranks,
        communication=rows,
        communication_totals=totals,
        verdict=Verdict(
            fits=None if capacity is None else highest.memory.device_bytes <= capacity,
            state=None if capacity is None else "fits" if highest.memory.device_range_bytes[1] <= capacity else "does not fit",
            gpu=job.hardware.name,
            capacity_bytes=capacity,
            tightest_rank=highest.ranks[0][0],
            headroom_bytes=None if capacity is None else capacity - highest.memory.device_bytes,
        ),
        advice=advice,
        assumptions=(
            "Megatron-LM 0.16.1 and Transformer Engine 2.11.",
            "Attention uses flash attention, which saves no attention scores.",
        ),
    )


def small_report(**changes: Any) -> Report:
    """Return the report for 16 GPUs. `changes` are fields of Report."""
    return replace(make_report(make_job()), **changes)


def large_report() -> Report:
    """Return the report for 16,384 GPUs, with truncated groups."""
    job = make_job(layers=126, hidden=16384, heads=128, world_size=16384, nodes=2048, tensor=8, pipeline=16, expert_tensor=8)
    job = replace(
        job, batch=BatchSpec(micro_batch_size=1, global_batch_size=2048, seq_length=8192, microbatches=16, first_microbatches=16)
    )
    return make_report(job, limit=64)
