"""Reads an inference launch: the model and layout of a launch, with what is generated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.prepare import prepare
from analyzer.hardware.gpus import hardware
from analyzer.inference.dynamic_rules import check_engine
from analyzer.inference.forward_job import forward_job
from analyzer.inference.kv_cache import requests_of_blocks
from analyzer.inference.memory import largest_batch, stage_layers
from analyzer.launch.build import build
from analyzer.launch.derive.model.variants import is_counted
from analyzer.launch.derive.reading import option, positive
from analyzer.launch.inference.options import INFERENCE, MOST, STATIC_SCRIPTS, without_script_options
from analyzer.launch.inference.spec import inference_spec, requests_option, without_effect
from analyzer.launch.parse import parse
from analyzer.passes.stages import stage_models
from analyzer.specs import InferenceJob, TrainingJob
from analyzer.time.inputs import time_inputs

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.info_options import InfoOptions
    from analyzer.specs import InferenceSpec, ModelSpec
    from analyzer.specs.vision_part import Variant
    from analyzer.time.estimate import TimeInputs

_TRAINING_VALUES: Final[Mapping[str, object]] = {
    "micro_batch_size": 1, "global_batch_size": None, "rampup_batch_size": None, "step_batch_size_schedule": None,
    "cuda_graph_impl": "none", "cuda_graph_scope": None, "cuda_graph_modules": None, "enable_cuda_graph": False,
    "external_cuda_graph": False, "recompute_granularity": None, "recompute_activations": False, "recompute_method": None,
    "recompute_num_layers": None, "train_iters": None, "train_samples": None, "skip_train": False,
    "load": None, "recompute_modules": None, "tp_comm_overlap": False, "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False, "defer_embedding_wgrad_compute": False, "overlap_param_gather_with_optimizer_step": False,
    "optimizer_cpu_offload": False,
    "fine_grained_activation_offloading": False, "cpu_offloading_num_layers": 0, "hierarchical_context_parallel_sizes": None,
    "microbatch_group_size_per_vp_stage": None, "overlap_p2p_comm": False, "overlap_p2p_comm_warmup_flush": False,
}  # fmt: skip
"""Values that replace those of options without effect on inference, so that they need not suit a training."""
_LENGTH_MULTIPLE: Final = 128
"""Tokens of a rank that suit all recipes of FP8."""
_OF_TRAINING: Final = ("CUDA_DEVICE_MAX_CONNECTIONS", "--global-batch-size is not given")
"""Words in assumptions about training only."""
_WORDS_OF_TRAINING: Final = re.compile(r" --(seq-length \d+|micro-batch-size \d+|use-distributed-optimizer)(,|(?=\.))")
"""Options of a training among those that are assumed for a model without a script."""


_WITHOUT: Final[Mapping[str, tuple[object, str, str]]] = {
    "context_parallel_size": (1, "context parallelism", "the ranks are further replicas of the model"),
    "num_layers_per_virtual_pipeline_stage": (None, "virtual pipeline stages", "each rank has consecutive layers"),
    "num_virtual_stages_per_pipeline_rank": (None, "virtual pipeline stages", "each rank has consecutive layers"),
}
"""Options of the layout that Megatron-LM does not generate with (`Attention._get_pp_layer_offset_for_inference`, 0.16.1): the value
that replaces that of a training, the feature, and what is assumed instead."""


@dataclass(frozen=True, kw_only=True)
class InferenceLaunch:
    """An inference launch that was read."""

    job: InferenceJob
    options: InfoOptions
    note: str
    """About the GPU; empty if it is known."""
    time: TimeInputs | None
    """None if the speeds of the GPU are not known."""
    folder: Path
    """Where files are that options name."""
    command: tuple[str, ...]
    """The words of the launch."""


def read_inference(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> InferenceLaunch:
    """Reads the words of an inference launch. Raises AnalyzerError."""
    words, script = without_script_options(argv)
    if script.word("--model-provider") == "mamba":
        raise UnsupportedError("--model-provider mamba", "only GPT is modelled", "use a GPT")
    prepared = prepare(words, environ=environ, folder=folder)
    environ = prepared.environ
    arguments, world, options = parse(prepared.argv, environ=environ, folder=folder, own=prepared.own)
    arguments = _with_layout(arguments, of_script=bool(script.script))
    gpu, notes = hardware(options.gpu, options.gpu_memory)
    if options.margin is not None and gpu.capacity_bytes is not None:
        gpu = replace(gpu, margin_bytes=options.margin.of(gpu.capacity_bytes))
    if gpu.name is None and options.hardware is None:
        for field in ("network", "calibration", "efficiency", "price"):
            if getattr(options, field):
                raise InputError(f"--info-{field}", "needs a GPU", "add --info-gpu NAME or --info-hardware FILE")
    training = build(
        _without_training(arguments),
        world,
        environ=environ,
        gpu=gpu,
        folder=folder,
        moe_imbalance=options.moe_imbalance,
        strict=options.strict,
    )
    if training.model.hybrid is not None:
        raise UnsupportedError("--hybrid-layer-pattern", "inference of Mamba hybrids is not modelled", "use a GPT")
    model = training.model
    _check_attention(model, arguments.parts.variant)
    if training.model.family != "gpt":
        raise UnsupportedError(arguments.entry or "the script", "trains no GPT, and only GPTs generate text", "use pretrain_gpt.py")
    spec = inference_spec(arguments, script, options.inference, options.quantize, model=training.model)
    if options.offload is not None and spec.dynamic is not None and script.script not in STATIC_SCRIPTS:
        asks = arguments.get("inference_dynamic_batching")
        remedy = "leave out --inference-dynamic-batching" if asks else "give a launch of a static engine"
        raise UnsupportedError("--info-offload", "the dynamic engine keeps weights and cache on the GPU", remedy)
    known = gpu.name is not None or options.hardware is not None
    job = _job(training, spec)
    job = replace(job, warnings=(*job.warnings, *without_effect(arguments, script, spec)))
    time = time_inputs(options, arguments, gpu=gpu.name, folder=folder) if known else None
    if asks_for_serving(options):
        from analyzer.inference.serving.report import serving_job

        job = serving_job(job, options, None if time is None else time.speed)
    elif options.inference is not None and options.inference.batch is None:
        job = _with_largest_batch(job, offload=options.offload is not None)
    return InferenceLaunch(
        job=_with_batch_of_blocks(job, requests_option(arguments) if script.script in STATIC_SCRIPTS else None),
        options=options,
        note=" ".join(notes),
        time=time,
        folder=folder,
        command=tuple(argv),
    )


def _check_attention(model: ModelSpec, variant: Variant | None) -> None:
    """Raises UnsupportedError for models whose generation is not modelled."""
    if model.sparse_attention or model.linear_attention:
        fault = "inference with sparse or linear attention is not modelled"
        raise UnsupportedError("--experimental-attention-variant", fault, "use a GPT without it")
    not_counted = variant is not None and not is_counted(variant)
    if model.plugin or model.compressed_attention or not_counted:
        named = variant or ("the layers of DeepSeek-V4" if model.compressed_attention else "the modules of a plugin")
        raise UnsupportedError("the model", f"inference of {named} is not modelled", "use a GPT with the layers of Megatron-LM")


def asks_for_serving(options: InfoOptions) -> bool:
    """Whether an option of serving engines is given."""
    return any(each is not None for each in (options.serving_engine, options.serving, options.serving_search))


def _with_largest_batch(job: InferenceJob, *, offload: bool) -> InferenceJob:
    """The job with the largest batch that fits; with a batch of 1 if none does. Raises InputError if it is not known."""
    given = f"{INFERENCE} batch={MOST}"
    if offload:
        raise InputError(given, "is not known with --info-offload", "write the requests of a block, such as batch=64")
    if job.hardware.capacity_bytes is None:
        raise InputError(given, "needs the memory of a GPU", "add --info-gpu NAME, such as H100-80GB")
    most = largest_batch(job)
    allocated = job.inference.cache_requests
    return replace(job, inference=replace(job.inference, batch_size=max(1, most if allocated is None else min(most, allocated))))


def _with_layout(arguments: Arguments, *, of_script: bool) -> Arguments:
    """The arguments with a layout that Megatron-LM generates with, and a warning for each option that is replaced.

    Raises UnsupportedError for such an option in the launch of an inference script, which Megatron refuses.
    """
    changed: dict[str, object] = {}
    warnings: list[str] = []
    for dest, (value, feature, instead) in _WITHOUT.items():
        if arguments.get(dest) in (None, value):
            continue
        named = option(arguments, dest)
        if of_script:
            raise UnsupportedError(named, f"Megatron-LM generates without {feature}", "leave it out")
        changed[dest] = value
        warnings.append(f"{named}: Megatron-LM generates without {feature}; {instead}.")
    values = MappingProxyType({**arguments.values, **changed})
    return replace(arguments, values=values, given=arguments.given - changed.keys(), warnings=(*arguments.warnings, *warnings))


def _without_training(arguments: Arguments) -> Arguments:
    """The arguments with the values of a training that any layout accepts."""
    tensor = positive(arguments, "tensor_model_parallel_size") or 1
    changed = {dest: value for dest, value in _TRAINING_VALUES.items() if dest in arguments.values}
    if tensor > 1 and arguments.get("num_experts") and "sequence_parallel" in arguments.values:
        changed["sequence_parallel"] = True  # Megatron needs it to train experts with tensor parallelism
    if arguments.get("fp8") is not None or arguments.get("fp4") is not None:  # for which a training needs a multiple
        multiple = _LENGTH_MULTIPLE * tensor * (positive(arguments, "context_parallel_size") or 1)
        length = positive(arguments, "seq_length") or multiple
        changed["seq_length"] = max(length // multiple * multiple, min(length, multiple))
    if arguments.get("transformer_impl") == "inference_optimized":
        changed["transformer_impl"] = "transformer_engine"
    values = MappingProxyType({**arguments.values, **changed})
    return replace(arguments, values=values, given=arguments.given - changed.keys())


def _job(training: TrainingJob, spec: InferenceSpec) -> InferenceJob:
    """The inference job with the model and layout of a training job."""
    notes = [_WORDS_OF_TRAINING.sub("", note) for note in training.assumptions if not _is_of_training(note)]
    notes = [note.replace(",.", ".") for note in notes if not note.endswith(":.")]
    if training.precision.fp8 is not None:
        notes.append("FP8 of the launch is not used: linear layers compute in 16 bit, or as --info-quantize tells.")
    if training.model.mtp_num_layers:
        notes.append("Layers of multi-token prediction are not loaded.")
    return InferenceJob(
        model=training.model,
        parallel=replace(training.parallel, sequence_parallel=False),
        precision=training.precision,
        inference=spec,
        hardware=training.hardware,
        megatron=training.megatron,
        software=training.software,
        assumptions=tuple(notes),
        warnings=tuple(note for note in training.warnings if not _is_of_training(note)),
        unknown=training.unknown,
        assumed_vocabulary=training.assumed_vocabulary,
    )


def _is_of_training(note: str) -> bool:
    return any(words in note for words in _OF_TRAINING)


def _with_batch_of_blocks(job: InferenceJob, requests: str | None) -> InferenceJob:
    """The job of the dynamic engine with all requests that its blocks have room for, if the launch does not give their number.

    `requests`: the option of a static engine that gives their number, otherwise None. Raises InputError if the engine refuses it.
    """
    spec = job.inference
    if spec.dynamic is None:
        return job
    layers = stage_layers(stage_models(forward_job(job, requests=1, tokens=1)))
    check_engine(job, layers, requests=requests)
    return (
        job
        if spec.batch_size
        else replace(job, inference=replace(spec, batch_size=requests_of_blocks(job, layers, spec.sequence_length)))
    )
