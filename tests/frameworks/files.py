"""Writes configurations of frameworks, and reads them as the command line does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analyzer.api import Launch, read_launch
from analyzer.specs import TrainingJob

_NEMO_RL = """
sft: {{max_num_steps: 10}}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
policy:
  model_name: {model}
  max_total_sequence_length: 4096
  train_global_batch_size: 32
  train_micro_batch_size: 1
  precision: bfloat16
  megatron_cfg: {{enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, context_parallel_size: 1,
    expert_model_parallel_size: {experts}}}
"""


def nemo_rl(model: object, *, experts: int = 1) -> str:
    """The YAML of a fine-tuning of NeMo-RL on 8 GPUs, of a model by its name or folder. `experts`: the expert-parallel size."""
    return _NEMO_RL.format(model=model, experts=experts)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the text of each file, whose path is relative to `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def read(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> Launch:
    """The launch of `words` in `folder`."""
    return read_launch(words, environ=dict(environ or {}), folder=folder)


def job(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> TrainingJob:
    """The job of `words` in `folder`."""
    return read(folder, *words, environ=environ).job


def layout(job: TrainingJob) -> tuple[int, ...]:
    """GPUs, and the tensor, pipeline, context, expert and expert-tensor sizes."""
    each = job.parallel
    return each.world_size, each.tensor, each.pipeline, each.context, each.expert, each.expert_tensor


def batch(job: TrainingJob) -> tuple[int, int, int]:
    """Micro-batch size, global batch size and sequence length."""
    return job.batch.micro_batch_size, job.batch.global_batch_size, job.batch.seq_length
