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
LATENT_BLOCK: Final = 64
"""Tokens in a block that the kernel for latent attention needs."""
_LENGTH: Final = "inference_max_seq_length"
_REQUESTS: Final = ("inference_max_requests", "inference_max_batch_size")
_BUFFER: Final = "inference_dynamic_batching_buffer_size_gb"
_BLOCK: Final = ("inference_dynamic_batching_block_size", "inference_dynamic_batching_chunk_size")
_GRAPHS: Final = ("cuda_graph_impl", "enable_cuda_graph")


def inference_spec(
    arguments: Arguments, script: ScriptOptions, asked: Generation | None, quantized: Quantization | None, *, model: ModelSpec
) -> InferenceSpec:
    """The batch, its lengths, the cache and quantization.

    The batch size is 0 if the blocks of the dynamic engine determine it. Raises InputError for options that contradict each other.
    """
    engine, latent = _engine(arguments, script), model.mla is not None
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
        batch, prompt, generate = asked
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


def _dynamic(arguments: Arguments, requests: int | None, *, latent: bool, static: bool) -> DynamicEngineSpec:
    """The buffers of the dynamic engine. `static`: inside the static engine, which schedules at most `requests` requests."""
    block = next((found for dest in _BLOCK if (found := positive(arguments, dest))), 256)
    if latent and not switched_on(arguments, "cache_mla_latents"):
        raise InputError(
            "--cache-mla-latents", "the dynamic engine needs it for multi-latent attention", "add it, and a block size of 64"
        )
    if latent and block != LATENT_BLOCK:
        raise InputError(
            option(arguments, _BLOCK[0]), f"the kernel of latent attention needs blocks of {LATENT_BLOCK} tokens", "write 64"
        )
    return DynamicEngineSpec(
        buffer_bytes=int(number(arguments, _BUFFER, 40.0) * GIB),
        block_tokens=block,
        max_requests=requests if static else positive(arguments, "inference_dynamic_batching_max_requests"),
        max_tokens=positive(arguments, "inference_dynamic_batching_max_tokens") or DynamicEngineSpec.max_tokens,
        in_static_engine=static,
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
        named = option(arguments, _REQUESTS[0] if "inference_max_requests" in arguments.values else _REQUESTS[1])
        raise InputError(named, f"{requests} requests are fewer than the {batch} of {INFERENCE}", f"write {batch} or more")
    if longest is not None and tokens > longest:
        source = INFERENCE if not script.values or "--num-tokens-to-generate" not in script.values else "the script's options"
        fault = f"{longest} tokens are fewer than the {tokens} of prompt and generated tokens ({source})"
        raise InputError(option(arguments, _LENGTH), fault, f"write {tokens} or more")
