"""What megatron-core's dynamic inference engine refuses.

Source: `DynamicInferenceContext.__init__` (core/inference/contexts/dynamic_context.py) of megatron-core 0.14.0, 0.15.3, 0.16.1,
0.17.1, 0.18.2 and 0.19.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from analyzer.errors import InputError
from analyzer.inference.kv_cache import requests_of_blocks, table_requests
from analyzer.specs import InferenceJob
from analyzer.specs.inference import DynamicEngineSpec
from analyzer.specs.release import is_before

LEGACY: Final = "--use-legacy-static-engine"
_TENSOR: Final = "--tensor-model-parallel-size"
_REQUESTS: Final = "--inference-dynamic-batching-max-requests"
_TOKENS: Final = "--inference-dynamic-batching-max-tokens"
_BUFFER: Final = "--inference-dynamic-batching-buffer-size-gb"


def check_engine(job: InferenceJob, stages: Sequence[Sequence[int]], *, requests: str | None) -> None:
    """Raises InputError if the dynamic engine cannot be built for a job. `stages` has the layers of each pipeline rank.

    `requests`: None for the scripts of the dynamic engine; for those of the static engine, which uses it from core 0.16 on, the
    option that gives the number of requests. Megatron-LM then continues with the engine of `--use-legacy-static-engine`.
    """
    legacy = "" if requests is None else f", or add {LEGACY}, which Megatron-LM falls back to"
    _check_groups(job, legacy)
    _check_rows(job, stages, requests or _REQUESTS, legacy)
    _check_room(job, stages, requests or _REQUESTS)


def _check_groups(job: InferenceJob, legacy: str) -> None:
    tensor, groups = job.parallel.tensor, job.model.num_query_groups
    if job.model.mla is None and groups % tensor and is_before(job.megatron, "0.17"):
        fault = (
            f"the dynamic engine before core 0.17 needs a divisor of the {groups} groups of keys and values, and {tensor} is none"
        )
        raise InputError(_TENSOR, fault, f"write a divisor of {groups}{legacy}")


def _check_rows(job: InferenceJob, stages: Sequence[Sequence[int]], option: str, legacy: str) -> None:
    """Rows of the tables for requests, which before core 0.16 are limited to the tokens of a step."""
    dynamic, tensor = job.inference.dynamic, job.parallel.tensor
    assert dynamic is not None
    if is_before(job.megatron, "0.16"):
        return
    rows, given = table_requests(job, stages), dynamic.max_requests is not None and not dynamic.in_static_engine
    if given and rows % tensor and not is_before(job.megatron, "0.17"):
        fault = f"{rows} requests are not a multiple of the {tensor} tensor-parallel ranks, which the dynamic engine needs"
        raise InputError(option, fault, f"write a multiple of {tensor}{legacy}")
    if rows <= dynamic.max_tokens:
        return
    few = max(tensor, dynamic.max_tokens // tensor * tensor)
    if given:
        fault = f"{rows} requests are more than the {dynamic.max_tokens} tokens of a step ({_TOKENS})"
        raise InputError(option, fault, f"write {few} or less{legacy}")
    if dynamic.max_tokens != DynamicEngineSpec.max_tokens:
        fault = f"{dynamic.max_tokens} tokens of a step are fewer than the {rows} requests that the blocks have room for"
        raise InputError(_TOKENS, fault, f"write {rows} or more, or add {_REQUESTS} {few}")
    fault = f"the blocks have room for {rows} requests, more than the {dynamic.max_tokens} tokens of a step"
    raise InputError(_BUFFER, fault, f"write less{legacy}" if legacy else f"write less, or add {_REQUESTS} {few}")


def _check_room(job: InferenceJob, stages: Sequence[Sequence[int]], option: str) -> None:
    """Whether the requests, all at the same time, have rows and blocks."""
    spec = job.inference
    assert spec.dynamic is not None
    if spec.dynamic.max_requests is not None and spec.batch_size > spec.dynamic.max_requests:
        fault = f"{spec.dynamic.max_requests} requests are fewer than the {spec.batch_size} of --info-inference"
        raise InputError(option, fault, f"write {spec.batch_size} or more")
    room = requests_of_blocks(job, stages, spec.sequence_length)
    if spec.batch_size > room or not room:
        fault = f"the buffer has room for {room} requests of {spec.sequence_length} tokens"
        raise InputError(_BUFFER, fault, "write more, or fewer requests in --info-inference")
