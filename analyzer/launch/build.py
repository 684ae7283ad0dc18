"""Builds the `TrainingJob` of a launch from Megatron's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.checks import option_violations
from analyzer.launch.checks.tolerated import warn_of_tolerated
from analyzer.launch.coverage.ignored import ignored_options
from analyzer.launch.coverage.supported import assumptions_of, refuse_unmodelled
from analyzer.launch.derive.activations import activation_offload_spec
from analyzer.launch.derive.batch import batch_spec
from analyzer.launch.derive.cuda_graphs import graph_spec
from analyzer.launch.derive.earlier_releases import assume_earlier_release
from analyzer.launch.derive.fp8 import fp8_spec, with_fp8_attention, with_fp8_weights
from analyzer.launch.derive.fsdp import fsdp_spec, sharding_optimizer
from analyzer.launch.derive.launch_input import LaunchInput
from analyzer.launch.derive.model.experts import check_dense, num_experts
from analyzer.launch.derive.model.families import check_family, complete_family, shape_of_family
from analyzer.launch.derive.model.gpt import check_fused_activation, model_spec
from analyzer.launch.derive.model.hybrid import hybrid_blocks, hybrid_spec, with_implied_options
from analyzer.launch.derive.model.mtp import mtp_layers_of
from analyzer.launch.derive.model.shape import decoder_shape
from analyzer.launch.derive.optimizer import optimizer_spec
from analyzer.launch.derive.parallel import parallel_spec
from analyzer.launch.derive.precision import precision_spec
from analyzer.launch.derive.reading import LARGEST_CHUNKS, LARGEST_LOCAL_EXPERTS, option, refuse, since
from analyzer.launch.derive.recompute import recompute_spec
from analyzer.launch.derive.smallest_world import smallest_world
from analyzer.launch.derive.training_flags import training_flags
from analyzer.launch.info_options import IMAGE_TOKENS, MODEL, NO_IMAGES, SAMPLE_LENGTH
from analyzer.launch.nccl import nccl_spec
from analyzer.launch.software import check_software, software_in
from analyzer.launch.tokenizer.vocabulary import read_vocabulary
from analyzer.specs import HardwareSpec, ModelSpec, MoeSpec, ParallelSpec, PrecisionSpec, RecomputeSpec, SoftwareSpec, TrainingJob
from analyzer.specs.adapters import AdapterLayers, AdapterMethod
from analyzer.specs.fine_tuning import ALL_PARAMETERS, TYPICAL_SAMPLE
from analyzer.specs.rules import Violation, violations

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.model.shape import Shape
    from analyzer.launch.launchers.world import World
    from analyzer.launch.megatron_words import MegatronWords
    from analyzer.launch.tokenizer.vocabulary import Vocabulary
    from analyzer.specs.fine_tuning import OtherTraining, Phase
    from analyzer.specs.model import BlockSpec


def build(
    arguments: Arguments,
    world: World | None,
    *,
    environ: Mapping[str, str],
    gpu: HardwareSpec,
    folder: Path,
    moe_imbalance: float = 1.0,
    strict: bool = False,
) -> TrainingJob:
    """The training job of a launch, with everything that Megatron's `validate_args` and configs derive and check.

    `environ` is the environment and `folder` the working folder of the launch. Without `world` the smallest number of GPUs is used
    that the layout allows. `moe_imbalance`: tokens of the experts of the
    highest-memory rank over the mean. With `strict` an unknown vocabulary size is an error. Raises InputError for what Megatron
    refuses, UnsupportedError for what is not modelled. Of an elastic number of nodes the largest is used, or the smallest if the
    launch does not work with the largest.
    """
    with_world = partial(_build, arguments, environ=environ, gpu=gpu, folder=folder, moe_imbalance=moe_imbalance, strict=strict)
    try:
        return with_world(world)
    except InputError:
        if world is None or world.elastic is None:
            raise
        try:
            return with_world(replace(world, nodes=world.elastic[1]))
        except InputError:
            pass
        raise


def _build(
    arguments: Arguments,
    world: World | None,
    *,
    environ: Mapping[str, str],
    gpu: HardwareSpec,
    folder: Path,
    moe_imbalance: float,
    strict: bool,
) -> TrainingJob:
    """The training job for one number of GPUs."""
    launch = with_implied_options(LaunchInput(arguments=arguments, environ=environ, folder=folder, gpu=gpu, strict=strict))
    arguments = launch.arguments
    launch.assume(*arguments.assumptions, *filter(None, [arguments.versions]))
    if world is None:
        world = smallest_world(launch)
    launch.assume(*world.assumptions)
    launch.warn(*arguments.warnings)
    assume_earlier_release(launch)
    launch.state_unknown(*arguments.unknown)
    _state_elastic(launch, world)
    refuse_unmodelled(arguments)
    shape = decoder_shape(launch)
    parallel = parallel_spec(launch, world, num_layers=shape.num_layers)
    check_family(launch)
    shape = shape_of_family(launch, shape, parallel)
    batch = batch_spec(launch, parallel=parallel, seq_length=shape.seq_length)
    precision = precision_spec(arguments)
    optimizer = optimizer_spec(arguments, gradients=precision.gradients)
    vocabulary = read_vocabulary(launch, tensor=parallel.tensor)
    model = _model(launch, shape, vocabulary, parallel, precision, moe_imbalance=moe_imbalance)
    precision = replace(precision, fp8=fp8_spec(launch, model=model, parallel=parallel, optimizer=optimizer))
    recompute = recompute_spec(arguments, model=model)
    model = replace(model, blocks=_blocks(launch, model, recompute))
    flags = training_flags(launch, model=model, parallel=parallel, precision=precision)
    graphs = graph_spec(launch, model=model)
    fsdp = fsdp_spec(launch, model=model, precision=precision, optimizer=optimizer, flags=flags)
    job = TrainingJob(
        model=model,
        parallel=parallel,
        batch=batch,
        precision=precision,
        optimizer=sharding_optimizer(optimizer, fsdp, release_switches_overlap=not since(arguments, "0.14")),
        recompute=recompute,
        flags=flags,
        hardware=gpu,
        megatron=arguments.release,
        software=_software(arguments, model),
        assumed_vocabulary=vocabulary.assumed,
        fsdp=fsdp,
        graphs=graphs,
        withheld=arguments.withheld,
        tuning=arguments.tuning,
        activation_offload=activation_offload_spec(arguments, model=model, graphs=graphs, fp8=precision.fp8),
        nccl=nccl_spec(launch.environ),
    )
    job = with_fp8_weights(launch, job)
    job = with_fp8_attention(launch, _with_plugin(launch, _with_compressed(launch, _with_variant(launch, job))))
    return _checked(launch, _with_adapters(launch, job))


def _checked(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with all that is said about the launch. Raises InputError for what Megatron refuses."""
    arguments = launch.arguments
    broken = [*option_violations(launch, job), *violations(job)]
    refuse(arguments, (each for each in broken if not each.library))
    _warn_of_libraries(launch, broken)
    warn_of_tolerated(launch, job)
    _assume_few_groups(launch, job.model, job.parallel)
    launch.warn(*assumptions_of(arguments), *ignored_options(arguments, tensor=job.parallel.tensor))
    return replace(job, assumptions=tuple(launch.assumptions), warnings=tuple(launch.warnings), unknown=tuple(launch.unknown))


def _with_variant(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the modules that Megatron-LM does not have, if its model has some."""
    if launch.arguments.parts.variant is None:
        return job
    from analyzer.launch.derive.model.variants import with_variant  # imported for such launches only

    return with_variant(launch, job)


def _with_compressed(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the attention and the residual stream of DeepSeek-V4, if its model has them."""
    if launch.arguments.parts.compressed is None:
        return job
    from analyzer.launch.derive.model.compressed import with_compressed_attention  # imported for such launches only

    return with_compressed_attention(launch, job)


def _with_plugin(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with weights in its attention whose activations are not modelled, if it has some."""
    if launch.arguments.parts.plugin is None and launch.arguments.get("experimental_attention_variant") != "dsa":
        return job
    from analyzer.launch.derive.model.plugin import with_plugin  # imported for such launches only

    return with_plugin(launch, job)


_FRAMEWORKS: Final[dict[AdapterLayers, str]] = {"megatron": "Megatron-Bridge", "transformer_engine": "ms-swift"}
"""Whose adapters have these layers."""
_REGATHERED: Final = ", which gather their inputs again in the backward where sequence parallelism splits them"
_METHODS: Final[dict[AdapterMethod, str]] = {"lora": "LoRA", "canonical": "Canonical LoRA", "dora": "DoRA"}


def _with_adapters(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the adapters of the launch, and with what is not counted of its fine-tuning."""
    tuning, vision = launch.arguments.tuning, launch.arguments.parts.vision
    if tuning is ALL_PARAMETERS and vision is None:
        return job
    if vision is not None:
        from analyzer.launch.derive.vision_part import with_vision_part

        job, tuning = with_vision_part(launch, job)
        job = replace(job, tuning=tuning)
    elif tuning.vision is not None and tuning.vision.image_tokens is not None:
        raise InputError(IMAGE_TOKENS, NO_IMAGES, "remove it")
    from analyzer.launch.derive.adapters import adapter_spec  # imported for fine-tuning only
    from analyzer.launch.derive.distillation import note_on, with_distillation, with_log_probabilities, with_phase_models
    from analyzer.launch.derive.freezing import freeze_spec
    from analyzer.launch.derive.sample_head import with_head

    tuning, not_known = with_phase_models(tuning, partial(_with_model, job=job, launch=launch))
    job, outputs = with_head(tuning, job)
    job, loss = with_distillation(tuning, job)
    job, log_probabilities = with_log_probabilities(tuning, job)
    adapters, reason = adapter_spec(tuning.adapter, job)
    frozen, counted = freeze_spec(tuning, job)
    reasons = [each for each in (reason, counted, outputs, loss, log_probabilities, not_known) if each]
    withheld = dict.fromkeys([*job.withheld, *reasons, *tuning.not_counted()])
    not_counted = dict.fromkeys([*job.not_counted, *tuning.needs_more(pipeline=job.parallel.pipeline)])
    if adapters is not None:
        launch.assume(
            f"{_METHODS[adapters.method]} adapters of rank {adapters.rank} beside {', '.join(adapters.targets)} are counted as "
            f"those of {_FRAMEWORKS[adapters.layers]}{_REGATHERED if adapters.regathers else ''}. "
            "All other weights are frozen. TFLOP/s and MFU count their gradients too, which are not computed, as Megatron does."
        )
    if frozen is not None:
        launch.assume(
            f"Parameters that {', '.join(tuning.frozen)} freezes have no gradients and no optimizer states. TFLOP/s and MFU count "
            "their gradients too, which are not computed, as Megatron does."
        )
    if job.model.head_outputs is not None:
        launch.assume(
            f"The output layer is a linear layer with {job.model.head_outputs} output{'s' if job.model.head_outputs > 1 else ''}."
            if job.model.head_outputs
            else "The output is that of the final norm, divided by its length: there is no output layer."
        )
    if job.model.token_score:
        launch.assume("The loss reads the difference of the logits of two tokens, of which only those of the last tokens count.")
    if job.model.distillation is not None:
        launch.assume(note_on(job.model.distillation))
    length = _sample_length(launch, job)
    model = replace(job.model, adapters=adapters, frozen_parameters=frozen, sample_length=length)
    return replace(job, model=model, tuning=tuning, withheld=tuple(withheld), not_counted=tuple(not_counted))


def _with_model(phase: Phase, *, job: TrainingJob, launch: LaunchInput) -> Phase | None:
    """The phase with the sizes of the model that it names; None if they are not known.

    Raises InputError if its layout cannot have the model.
    """
    if phase.training is not None:
        return _with_training(phase, phase.training, job=job, launch=launch)
    from analyzer.launch.model_config.published import published_model  # imported for launches with another model only

    parallel, name = job.parallel, phase.model_name
    sizes = {
        MODEL: published_model(name) or name,
        "--info-megatron": job.megatron,
        "--info-world-size": parallel.world_size,
        "--seq-length": job.batch.seq_length,
        "--micro-batch-size": 1,
    }
    words = [str(word) for pair in sizes.items() for word in pair]
    words += [f"--{job.precision.parameters}", *(phase.layout or _layout_words(job))]
    found = _built_beside(job, words, environ={}, folder=launch.folder, refusal=(name, "cannot have this layout"))
    return None if found is None else replace(phase, model=found.model, parallel=found.parallel if phase.layout else None)


def _with_training(phase: Phase, training: OtherTraining, *, job: TrainingJob, launch: LaunchInput) -> Phase | None:
    """The phase with the job of another training on the same GPUs; None if it is not modelled."""
    from analyzer.launch.launchers.world import World  # imported for launches with another training only
    from analyzer.launch.megatron_words import MegatronWords

    world = World(job.parallel.nodes, job.parallel.gpus_per_node)
    own = MegatronWords(training.words, model=phase.model_name, world=world, tuning=training.tuning)
    words, refusal = ["--info-megatron", job.megatron], (f"the {phase.name} {phase.model_name}", "is refused")
    found = _built_beside(job, words, environ=launch.environ, folder=launch.folder, refusal=refusal, own=own)
    return None if found is None else replace(phase, training=replace(training, job=found))


def _built_beside(
    job: TrainingJob,
    words: list[str],
    *,
    environ: Mapping[str, str],
    folder: Path,
    refusal: tuple[str, str],
    own: MegatronWords | None = None,
) -> TrainingJob | None:
    """The job of another model on the GPUs of `job`, from its words; None if it is not known or not modelled.

    Raises InputError for what Megatron refuses: `refusal` is the name of the model, and what is said of it.
    """
    from analyzer.launch.parse import parse  # imported for launches with another model only

    try:
        arguments, world, _ = parse(words, environ=environ, folder=folder, own=own)
        return build(arguments, world, environ=environ, gpu=job.hardware, folder=folder)
    except UnsupportedError:
        return None
    except InputError as error:
        if error.option == MODEL:
            return None
        name, fault = refusal
        raise InputError(name, f"{fault} ({error.option}: {error.fault})", error.remedy) from None


def _layout_words(job: TrainingJob) -> list[str]:
    """The options of the layout of a job."""
    parallel = job.parallel
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor,
        "--pipeline-model-parallel-size": parallel.pipeline,
        "--context-parallel-size": parallel.context,
    }
    if job.model.moe is not None:
        sizes |= {"--expert-model-parallel-size": parallel.expert, "--expert-tensor-parallel-size": parallel.expert_tensor}
    words = [str(word) for pair in sizes.items() for word in pair]
    return [*words, "--sequence-parallel"] if parallel.sequence_parallel else words


def _sample_length(launch: LaunchInput, job: TrainingJob) -> int | None:
    """Tokens of packed samples; None if a sequence is one sample that is not packed. Raises InputError if a sequence is shorter."""
    tuning, sequence = launch.arguments.tuning, job.batch.seq_length
    length = tuning.sample_length
    if length is None and tuning.longest_sample is not None:
        return tuning.longest_sample if tuning.longest_sample < sequence else None
    if length is None:
        if not tuning.packed or sequence <= TYPICAL_SAMPLE:
            return None
        launch.assume(
            f"Packed samples of {TYPICAL_SAMPLE} tokens are assumed, as of instruction data. The time of attention and of what the "
            f"host does for each sample depends on it. {SAMPLE_LENGTH} gives the length of a sample."
        )
        return TYPICAL_SAMPLE
    if length > sequence:
        raise InputError(SAMPLE_LENGTH, f"{length} is above the sequence length of {sequence}", f"use at most {sequence}")
    launch.assume(
        f"A sequence has samples of {length} tokens ({SAMPLE_LENGTH}), which attend to themselves only: the time of attention "
        "counts these pairs. TFLOP/s and MFU count those of whole sequences, as Megatron-LM does."
    )
    return length if length < sequence or tuning.packed else None


def _state_elastic(launch: LaunchInput, world: World) -> None:
    """States which number of an elastic launch's nodes is analyzed."""
    if world.elastic is None:
        return
    which = "smallest" if world.nodes == world.elastic[1] else "largest"
    nodes = f"{world.nodes} node{'s' if world.nodes > 1 else ''}"
    launch.state_unknown(f"{world.elastic[0]} is analyzed with {nodes}, the {which} number. --info-world-size chooses another.")


def _warn_of_libraries(launch: LaunchInput, broken: Sequence[Violation]) -> None:
    """Adds a warning for each rule of a library that the launch breaks."""
    for each in broken:
        if each.library:
            named = " × ".join(option(launch.arguments, dest) for dest in each.options)
            launch.warn(f"{named}: {each.fault} ({each.library}; another release may not refuse it). The remedy: {each.remedy}.")


def _refuse_large(arguments: Arguments, model: ModelSpec, parallel: ParallelSpec) -> None:
    """Raises InputError for products of sizes that would take too long."""
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    if chunks > LARGEST_CHUNKS:
        fault = f"{chunks} model chunks of all stages are above {LARGEST_CHUNKS}, the largest number that is modelled"
        raise InputError(option(arguments, "pipeline_model_parallel_size"), fault, "use fewer stages, or fewer virtual stages")
    if model.moe is None:
        return
    experts = model.moe.num_experts // parallel.expert * model.num_layers // parallel.pipeline
    if experts > LARGEST_LOCAL_EXPERTS:
        fault = f"the layers of a rank have {experts} experts, and {LARGEST_LOCAL_EXPERTS} is the largest number that is modelled"
        raise InputError(option(arguments, "num_experts"), fault, "use a larger --expert-model-parallel-size")


def _model(
    launch: LaunchInput,
    shape: Shape,
    vocabulary: Vocabulary,
    parallel: ParallelSpec,
    precision: PrecisionSpec,
    *,
    moe_imbalance: float,
) -> ModelSpec:
    """The model, with experts and MTP layers."""
    model = model_spec(
        launch,
        shape=shape,
        vocabulary=vocabulary,
        parallel=parallel,
        half_precision=precision.parameters != "fp32",
    )
    moe = _experts(launch, model, parallel, precision, imbalance=moe_imbalance)
    model = complete_family(launch, model, parallel, seq_length=shape.seq_length)
    hybrid = hybrid_spec(launch.arguments, model=model)
    model = replace(
        model,
        moe=moe,
        mtp_num_layers=mtp_layers_of(launch.arguments, model=model, context=parallel.context),
        hybrid=hybrid,
        blocks=() if hybrid is None else hybrid_blocks(hybrid),
    )
    check_fused_activation(model)
    _refuse_large(launch.arguments, model, parallel)
    return model


def _software(arguments: Arguments, model: ModelSpec) -> SoftwareSpec:
    software = software_in(arguments)
    check_software(software, model)
    return software


def _experts(
    launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec, precision: PrecisionSpec, *, imbalance: float
) -> MoeSpec | None:
    experts = num_experts(launch.arguments)
    if experts is None:
        check_dense(launch.arguments, imbalance=imbalance)
        return None
    from analyzer.launch.derive.model.moe import moe_spec  # imported for MoE models only, for a short start-up

    return moe_spec(launch, num_experts=experts, model=model, parallel=parallel, precision=precision, imbalance=imbalance)


def _blocks(launch: LaunchInput, model: ModelSpec, recompute: RecomputeSpec) -> tuple[BlockSpec, ...]:
    """Layers that differ by configuration; none for equal layers."""
    if model.hybrid is not None:
        return model.blocks
    dests = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
    if all(launch.arguments.get(dest) is None for dest in dests):
        return ()
    from analyzer.launch.derive.model.heterogeneous import block_specs  # imported for such models only

    return block_specs(launch, model=model, recompute=recompute)


def _assume_few_groups(launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec) -> None:
    groups = model.num_query_groups
    if model.mla is None and groups % parallel.tensor:
        named = option(launch.arguments, "num_query_groups")
        launch.warn(
            f"{named}: {groups} query groups are fewer than {parallel.tensor} tensor-parallel ranks: the gathered projections and "
            "the copies of keys and values are not counted, so the predicted peak is too low."
        )
