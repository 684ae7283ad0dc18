"""What is generated, and how the cache is allocated: from the options of this program, of the script and of Megatron.

Sources (megatron-core 0.16.1): core/inference/engines/static_engine.py, which from 0.16 on uses the dynamic engine unless
`--use-legacy-static-engine` is given; core/inference/contexts/dynamic_context.py; megatron/training/arguments.py
`_add_inference_args`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.reading import number, option, positive, since, switched_on
from analyzer.launch.inference.options import DYNAMIC_SCRIPTS, INFERENCE, STATIC_SCRIPTS
from analyzer.specs import ModelSpec
from analyzer.specs.inference import DynamicEngineSpec, InferenceSpec, QuantizationSpec
from analyzer.units import GIB

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.inference.options import Generation, Quantization, ScriptOptions

GENERATED: Final = 30
"""Default of `--num-tokens-to-generate`."""
INPUT_TOKENS: Final = 128
"""Default of `--num-input-tokens` of run_inference_performance_test.py."""
_SMALLEST_BUFFER: Final = 1e-3
_LARGEST_BUFFER: Final = 1e6
"""GiB."""
LATENT_BLOCK: Final = 64
"""Tokens in a block that the kernel for latent attention needs."""
_LENGTH: Final = "inference_max_seq_length"
_REQUESTS: Final = ("inference_max_requests", "inference_max_batch_size")
_BUFFER: Final = "inference_dynamic_batching_buffer_size_gb"
_BLOCK: Final = ("inference_dynamic_batching_block_size", "inference_dynamic_batching_chunk_size")
_MOST_REQUESTS: Final = "inference_dynamic_batching_max_requests"
_MOST_TOKENS: Final = "inference_dynamic_batching_max_tokens"
_LATENTS: Final = "cache_mla_latents"
_GRAPHS: Final = ("cuda_graph_impl", "enable_cuda_graph")


def inference_spec(
    arguments: Arguments, script: ScriptOptions, asked: Generation | None, quantized: Quantization | None, *, model: ModelSpec
) -> InferenceSpec:
    """The batch, its lengths, the cache and quantization.

    The batch size is 0 if the blocks of the dynamic engine determine it, and 1 if the largest is asked for.
    Raises InputError for options that contradict each other.
    """
    engine, latent = _engine(arguments, script), model.mla is not None
    if latent:
        _check_latent(arguments, script, engine)
    requests = next((found for dest in _REQUESTS if (found := positive(arguments, dest))), None)
    tokens = positive(arguments, _LENGTH)
    positions = model.max_position_embeddings if model.position_embedding == "learned_absolute" else None
    if engine == "compact":
        requests, tokens = None, None
    elif positions is not None:  # `DynamicInferenceContext.from_config`
        tokens = min(tokens or positions, positions)
    dynamic = _dynamic(arguments, requests, latent=latent, static=script.script in STATIC_SCRIPTS) if engine == "dynamic" else None
    if dynamic is not None and script.script != "gpt_dynamic_inference":  # it computes the length from its requests
        dynamic = replace(dynamic, request_tokens=tokens)
    if asked is not None:
        batch, prompt, generate = asked.batch or 1, asked.prompt, asked.generate
    else:
        batch, prompt, generate = _of_script(script, 0 if dynamic else requests or 1, tokens)
    _check(arguments, script, batch, prompt + generate, requests if engine == "static" else None, tokens)
    if positions is not None and prompt + generate > positions:
        fault = f"{prompt + generate} tokens of prompt and generation are more than the {positions} positions of the model"
        raise InputError(INFERENCE, fault, f"write at most {positions} tokens together")
    return InferenceSpec(
        batch_size=batch,
        prompt_tokens=prompt,
        generated_tokens=generate,
        quantization=QuantizationSpec()
        if quantized is None
        else QuantizationSpec(
            weight_bits=quantized.weights,
            activation_bits=quantized.activations,
            cache_bits=quantized.cache,
            group_size=quantized.group,
        ),
        cache=engine,  # type: ignore[arg-type]
        latent_cache=engine == "compact" or (engine == "dynamic" and latent),
        cache_requests=requests if engine == "static" else None,
        cache_tokens=tokens if engine == "static" else None,
        dynamic=dynamic,
        decode_graphs=engine == "compact" or arguments.get("cuda_graph_impl") == "local" or switched_on(arguments, _GRAPHS[1]),
    )


def _engine(arguments: Arguments, script: ScriptOptions) -> str:
    """The layout of the cache: that of the script's engine, and the compact one for other launches."""
    asks = switched_on(arguments, "inference_dynamic_batching") or script.word("--engine-type") == "dynamic"
    if asks or script.script in DYNAMIC_SCRIPTS:
        return "dynamic"
    if not script.script:
        return "compact"
    under_the_hood = since(arguments, "0.16") and not switched_on(arguments, "use_legacy_static_engine")
    return "dynamic" if under_the_hood else "static"


def _check_latent(arguments: Arguments, script: ScriptOptions, engine: str) -> None:
    """Raises InputError if the engine of a script cannot run multi-latent attention.

    From core 0.16 on `flash_decode_and_prefill` needs `is_decode_only`, which `MultiLatentAttention.forward` does not give it
    (megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.0). In 0.14.0 and 0.15.3 it has no such parameter.
    """
    if engine == "static" and switched_on(arguments, _LATENTS):
        fault = "the static engine does not run with it (an assertion in multi_latent_attention.py)"
        raise InputError("--cache-mla-latents", fault, "leave it out: the cache then has the keys and values of the heads")
    if engine != "dynamic" or not since(arguments, "0.16") or since(arguments, "0.20"):
        return
    fault = (
        "the dynamic engine of core 0.16 to 0.19 fails with it: MultiLatentAttention.forward calls flash_decode_and_prefill "
        "without is_decode_only"
    )
    legacy = "--use-legacy-static-engine, without --cache-mla-latents"
    if script.script in DYNAMIC_SCRIPTS:
        remedy = f"use gpt_static_inference.py with {legacy}, or core 0.15"
    elif script.word("--engine-type") == "dynamic":
        remedy = f"write --engine-type static and {legacy}"
    elif script.script:
        remedy = f"add {legacy}"
    else:
        remedy = "leave --inference-dynamic-batching out"
    raise InputError("--multi-latent-attention", fault, remedy)


def without_effect(arguments: Arguments, script: ScriptOptions, spec: InferenceSpec) -> list[str]:
    """A sentence for each option of an engine that is given and has no effect."""
    of_engine = (*_BLOCK, _MOST_REQUESTS, _MOST_TOKENS)
    ignored: tuple[str, ...] = of_engine
    reason = "the static engine does not give it to the dynamic one that it uses"
    if spec.cache == "compact":
        ignored, reason = (
            (_LENGTH, *_REQUESTS, _BUFFER, *of_engine),
            f"without an inference script the cache is that of {INFERENCE}",
        )
    elif spec.cache != "dynamic" or script.script not in STATIC_SCRIPTS:
        return []
    return [f"{option(arguments, dest)} has no effect: {reason}." for dest in ignored if dest in arguments.given]


def requests_option(arguments: Arguments) -> str:
    """The option with the number of requests that the static engine is allocated for."""
    return option(arguments, _REQUESTS[0] if _REQUESTS[0] in arguments.values else _REQUESTS[1])


def _dynamic(arguments: Arguments, requests: int | None, *, latent: bool, static: bool) -> DynamicEngineSpec:
    """The buffers of the dynamic engine.

    `static`: inside the static engine, which gives it no other option than the size of the buffer, and from core 0.17 on
    `requests`, the most requests that it schedules. In core 0.16 the blocks determine the rows of its tables.
    """
    size = number(arguments, _BUFFER, 40.0)
    if not _SMALLEST_BUFFER <= size <= _LARGEST_BUFFER:
        bounds = f"from {_SMALLEST_BUFFER:g} to {_LARGEST_BUFFER:,.0f}"
        raise InputError(option(arguments, _BUFFER), f"{size:g} is not a number {bounds}", "write GiB, such as 40")
    buffer_bytes = int(size * GIB)
    if static:
        return DynamicEngineSpec(buffer_bytes=buffer_bytes, max_requests=requests, in_static_engine=not since(arguments, "0.17"))
    block = next((found for dest in _BLOCK if (found := positive(arguments, dest))), DynamicEngineSpec.block_tokens)
    if latent and not switched_on(arguments, _LATENTS):
        raise InputError(
            "--cache-mla-latents", "the dynamic engine needs it for multi-latent attention", "add it, and a block size of 64"
        )
    if latent and block != LATENT_BLOCK:
        raise InputError(
            option(arguments, _BLOCK[0]), f"the kernel of latent attention needs blocks of {LATENT_BLOCK} tokens", "write 64"
        )
    most = (positive(arguments, dest) or positive(arguments, f"{dest}_override") for dest in (_MOST_REQUESTS, _MOST_TOKENS))
    max_requests, max_tokens = most
    return DynamicEngineSpec(
        buffer_bytes=buffer_bytes,
        block_tokens=block,
        max_requests=max_requests,
        max_tokens=max_tokens or DynamicEngineSpec.max_tokens,
    )


def _of_script(script: ScriptOptions, requests: int, tokens: int | None) -> tuple[int, int, int]:
    """Batch, prompt and generated tokens of a script: the largest that its options allow."""
    generate = script.number("--num-tokens-to-generate") or GENERATED
    prompt = script.number("--num-input-tokens") or script.number("--num-tokens-to-prompt")
    if prompt is None and script.script == "run_inference_performance_test":
        prompt = INPUT_TOKENS
    if prompt is None:
        prompt = max(1, (tokens or 0) - generate)
    return requests, prompt, generate


def _check(arguments: Arguments, script: ScriptOptions, batch: int, tokens: int, requests: int | None, longest: int | None) -> None:
    """Whether the requests fit into what the engine is allocated for."""
    if requests is not None and batch > requests:
        raise InputError(
            requests_option(arguments), f"{requests} requests are fewer than the {batch} of {INFERENCE}", f"write {batch} or more"
        )
    if longest is not None and tokens > longest:
        source = INFERENCE if not script.values or "--num-tokens-to-generate" not in script.values else "the script's options"
        fault = f"{longest} tokens are fewer than the {tokens} of prompt and generated tokens ({source})"
        raise InputError(option(arguments, _LENGTH), fault, f"write {tokens} or more")
