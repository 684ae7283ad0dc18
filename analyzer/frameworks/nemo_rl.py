"""Launches of NeMo-RL (NVIDIA-NeMo/RL) whose policy is trained by Megatron-LM (`policy.megatron_cfg`).

Sources: nemo_rl/models/megatron/setup.py, nemo_rl/algorithms/*.py and examples/configs of NeMo-RL, August 2026. A configuration
names the file that it changes in `defaults`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.adapters import bridge_adapter, bridge_vision, frozen_parts
from analyzer.frameworks.batches import Batch, packed_batch, plain_batch, replicas_of
from analyzer.frameworks.models import NamedModel, named_model
from analyzer.frameworks.options import Fields, Words, is_true
from analyzer.frameworks.prepare import Input, Output
from analyzer.frameworks.yaml_files import Files, Tree, get, included, merge, normal, of_file, override, resolve, table
from analyzer.launch.derive.model.variants import NEMO_RL
from analyzer.launch.launchers.world import World
from analyzer.launch.megatron_words import LayoutSettings, MegatronWords
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.choose_release import LaterRelease
from analyzer.specs.distillation import DistillationSpec, Divergence
from analyzer.specs.fine_tuning import ALL_STATES, Engine, FineTuning, ForwardPass, Phase, StatePart
from analyzer.specs.vision_part import ModelParts, VisionTraining
from analyzer.units import natural, share_of

_METHODS: Final = {
    "grpo": "GRPO",
    "ppo": "PPO",
    "distillation": "distillation",
    "dpo": "DPO",
    "rm": "reward model",
    "sft": "",
}
"""The key that a method has at the top of a configuration, and its name."""
_DIVERGENCES: Final[dict[str, Divergence]] = {"forward": "forward", "reverse": "reverse", "mixed": "mixed"}
"""The loss of a student by `loss_fn.kl_type`."""
_PACKED: Final = 4
"""Sequences that a packed microbatch of a student is counted with at least. With three or more the loss needs the most."""
_DTYPES: Final = {"bfloat16": ("--bf16",), "float16": ("--fp16",), "float32": ()}
_RENAMED: Final = {"expert_tensor_parallel_size": "expert_tensor_parallel_size", "offload_modules": "offload_modules"}
_READ: Final = frozenset({
    "enabled", "activation_checkpointing", "recompute_granularity", "recompute_modules", "fp8_cfg", "peft", "optimizer",
    "scheduler", "distributed_data_parallel_config", "model_overrides", "env_vars", "freeze_config", "freeze_moe_router",
    "sequence_parallel", "moe_enable_deepep", "cuda_graph_modules", "cuda_graph_impl", "cuda_graph_warmup_steps",
    "fine_grained_activation_offloading", "offload_modules", "mtp_num_layers", "mtp_use_repeated_layer",
    "moe_flex_dispatcher_backend",
})  # fmt: skip
"""Keys of megatron_cfg that are read here."""
_NO_EFFECT: Final = frozenset({
    "force_reconvert_from_hf", "converter_type", "train_iters", "checkpoint", "pipeline_dtype", "use_gloo_process_groups",
    "moe_per_layer_logging", "track_moe_metrics", "empty_unused_memory_level", "defer_fp32_logits", "mtp_detach_heads",
    "fused_linear_logprobs_chunk_size", "radio_force_cpe_eval_mode", "clear_memory_caches_before_refit", "moe_router_num_groups",
    "moe_router_group_topk", "inference_moe_token_dispatcher_type", "inference_grouped_gemm_backend",
    "force_overwrite_initial_ckpt", "moe_pad_experts_for_cuda_graph_inference", "hybridep_num_ranks_per_nvlink_domain",
    "hybridep_use_mnnvl", "layernorm_epsilon", "inference_cuda_graph_scope", "moe_router_bias_update_rate",
    "moe_router_enable_expert_bias", "mtp_loss_scaling_factor", "moe_hybridep_num_sms", "moe_grad_scale_func",
    "linear_ce_fusion_chunk_size", "converter_kwargs", "restart_inference_engine", "tokenizer_type", "load_optimizer",
    "moe_router_score_function",
})  # fmt: skip
"""Keys of megatron_cfg without an effect on the memory of an update. Logits are counted in fp32, as they are without
defer_fp32_logits."""
_OF_ADAPTERS: Final = frozenset({
    "enabled", "target_modules", "exclude_modules", "dim", "alpha", "dropout", "dropout_position", "a2a_experimental", "lora_dtype",
})  # fmt: skip
"""Keys of peft that the adapters get (`LoRA` in models/megatron/setup.py)."""
_OF_HYBRIDS: Final = LaterRelease("0.18.2", "HybridModelProvider, with which NeMo-RL builds hybrid models, needs core 0.18")
_ENGINE: Final = "policy.megatron_cfg."
_EXPERTS: Final = "moe_"
"""Keys that begin so have no effect without experts."""
_OF_OPTIMIZER: Final = frozenset({
    "lr", "min_lr", "weight_decay", "bf16", "fp16", "params_dtype", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum",
    "clip_grad", "decoupled_lr", "decoupled_min_lr",
})  # fmt: skip
_OF_GRADIENTS: Final = frozenset(
    {"grad_reduce_in_fp32", "average_in_collective", "data_parallel_sharding_strategy", "use_custom_fsdp"}
)
_UNPADDED: Final = ("--make-vocab-size-divisible-by", "1")
"""Bridge does not pad the vocabulary (`should_pad_vocab`)."""
_MODEL_PARALLEL: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_LAYOUT: Final = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
}
"""Options of the layout of another model, by its keys of megatron_cfg."""
_UNMASKED: Final = "--no-create-attention-mask-in-dataloader"
"""Packed sequences have no attention mask (nemo_rl/models/megatron/data.py)."""


def read(launch: Input) -> Output:
    """The training of the policy. Raises UnsupportedError if another engine than Megatron-LM trains, InputError for wrong keys."""
    name, before, after = launch.configuration("--config", "-c")
    words = [*before, *after]
    tree = load(launch.folder / name, name)
    rest = override(tree, words, name)
    if rest:
        raise InputError(rest[0], f"is no override of {name}", "write KEY=VALUE, such as policy.train_micro_batch_size=1")
    tree = resolve(tree, name, environ=launch.environ)
    if not is_true(get(tree, "policy.megatron_cfg.enabled", False)):
        fault = "trains without Megatron-LM (policy.megatron_cfg.enabled is false), and only Megatron-LM is modelled"
        raise UnsupportedError(name, fault, "give policy.megatron_cfg.enabled=true, or a configuration that has it")
    variables = {key: str(value) for key, value in table(tree, "policy.megatron_cfg.env_vars").items()}
    return Output(_words(tree, launch.folder), environ=variables)


def load(path: Path, name: str, files: Files | None = None) -> Tree:
    """The keys of a file on top of those of the files in its `defaults`."""
    files = files or Files()
    tree = files.tree(path, name)
    merged: Tree = {}
    for each in included(tree, "defaults", name):
        merge(merged, load(normal(path.parent / each), of_file(each, name), files))
    return merge(merged, tree)


def _words(tree: Tree, folder: Path) -> MegatronWords:
    method = next((key for key in _METHODS if key in tree), "")
    policy, config = table(tree, "policy"), table(tree, "policy.megatron_cfg")
    path = get(policy, "model_name")
    if not isinstance(path, str):
        raise InputError("policy.model_name", "is missing", "add it, with a Hugging Face name or the folder of a config.json")
    model = named_model("policy.model_name", path, folder=folder)
    fields = Fields(load_catalogue().newest)
    found = Words(list(model.defaults))
    precision = str(get(policy, "precision", "bfloat16"))
    if precision not in _DTYPES:
        raise InputError("policy.precision", f"{precision!r} is not known", f"use one of {', '.join(_DTYPES)}")
    found.words += _DTYPES[precision]
    world, about = _world(tree)
    batch = _batch(policy, world, pairs=method in ("dpo", "rm"))
    found.words += batch.words
    found.words += _UNPADDED
    ignored = _READ | _NO_EFFECT
    values = {key: value for key, value in config.items() if key not in ignored and (model.experts or not key.startswith(_EXPERTS))}
    found.add(fields.words(values, renamed=_RENAMED, prefix="policy.megatron_cfg."))
    found.words += _parallelism(config)
    found.words += _flex(config) if model.experts else []
    found.words += _recompute(config)
    found.words += _fp8(config)
    found.words += _heads(config, found, model)
    found.add(_optimizer(config, fields))
    found.add(fields.words(table(config, "model_overrides"), prefix="policy.megatron_cfg.model_overrides."))
    if method in ("dpo", "rm", "ppo") and table(policy, "reward_model_cfg"):
        found.unknown += ["policy.reward_model_cfg"] if is_true(get(policy, "reward_model_cfg.enabled", False)) else []
    found.unknown += [f"policy.{key}" for key in ("draft", "quant_cfg") if _is_on(policy.get(key))]
    return MegatronWords(
        words=tuple(found.words),
        model=model.name,
        world=world,
        notes=(f"The launch is one of NeMo-RL: {_what(method)} is analyzed.", *batch.notes, *about),
        statements=tuple(_statements(tree, found)),
        unknown=tuple(found.unknown),
        withheld=_withheld(tree, method, found),
        tuning=batch.tuned(
            replace(
                _tuning(tree, method),
                vision=_vision(config),
                log_probability_loss=_computes_log_probabilities(tree, method),
                loss_sequences=_loss_sequences(tree),
            )
        ),
        parts=ModelParts(builder=NEMO_RL),
        release=_OF_HYBRIDS if model.letters else None,
        layout=batch.layout,
    )


def _is_on(value: Any) -> bool:
    return is_true(value.get("enabled", False)) if isinstance(value, dict) else bool(value)


def _what(method: str) -> str:
    if method in ("grpo", "ppo", "distillation", ""):
        return "the update of the policy"
    return f"the {_METHODS[method] or 'SFT'} training"


def _withheld(tree: Tree, method: str, found: Words) -> tuple[str, ...]:
    reasons = [*found.withheld()]
    if method in ("sft", "dpo") and not _computes_log_probabilities(tree, method):
        reasons.append("the log-probabilities of NeMo-RL's loss are counted as a cross entropy of Megatron-LM")
    elif method in ("sft", "dpo") and _loss_sequences(tree):
        reasons.append("the memory of NeMo-RL's loss depends on the number of packed samples, which is assumed")
    return tuple(reasons)


def _computes_log_probabilities(tree: Tree, method: str) -> bool:
    """Whether the loss reads the log-probabilities of all tokens at once (`DistributedLogprob`), from whole logits in fp32."""
    policy = table(tree, "policy")
    other = (
        get(policy, "megatron_cfg.use_fused_linear_logprobs", False),
        get(policy, "megatron_cfg.defer_fp32_logits", False),
    )
    sampled = method in ("grpo", "ppo") and (get(policy, "generation.top_k") or get(policy, "generation.top_p", 1.0) != 1.0)
    return method in ("sft", "dpo", "grpo", "ppo") and not (any(map(is_true, other)) or policy.get("logprob_chunk_size") or sampled)


def _loss_sequences(tree: Tree) -> int:
    """The packed sequences of a microbatch, whose losses are computed one by one (`SequencePackingLossWrapper`); 0 without."""
    policy, packing = table(tree, "policy"), table(tree, "policy.sequence_packing")
    if not is_true(packing.get("enabled", False)) or is_true(packing.get("fuse_loss", False)):
        return 0
    length = _count(policy, "max_total_sequence_length")
    tokens = _count(policy, "sequence_packing.train_mb_tokens", length * _count(policy, "train_micro_batch_size"))
    return max(_PACKED, tokens // length)


def _batch(policy: Tree, world: World, *, pairs: bool) -> Batch:
    """Sequence length and batch sizes, and assumptions about them. `pairs`: a sample has two sequences."""
    length = _count(policy, "max_total_sequence_length")
    micro, samples = _count(policy, "train_micro_batch_size"), _count(policy, "train_global_batch_size")
    replicas = replicas_of(world, *(natural(str(get(policy, f"megatron_cfg.{name}"))) or 1 for name in _MODEL_PARALLEL))
    overriding = frozenset(table(policy, "megatron_cfg.model_overrides"))
    layout = LayoutSettings(_ENGINE, microbatch="policy.train_micro_batch_size", value=micro, overriding=overriding)
    if pairs:
        micro, samples = 2 * micro, 2 * samples
    for packing in ("sequence_packing", "dynamic_batching"):
        if is_true(get(policy, f"{packing}.enabled", False)):
            setting = f"policy.{packing}.train_mb_tokens"
            tokens = _count(policy, f"{packing}.train_mb_tokens", length * micro)
            batch = packed_batch(tokens, setting, samples=samples, length=length, replicas=replicas)
            longest = batch.longest_sample if packing == "sequence_packing" else None
            layout = layout._replace(microbatch=setting, value=tokens)
            return batch._replace(words=[*batch.words, _UNMASKED], longest_sample=longest, layout=layout)
    note = f"Sequences are assumed to have {length} tokens, from policy.max_total_sequence_length."
    note += " A sample is two sequences." if pairs else ""
    return plain_batch(length, micro, samples, note=note, layout=layout)


def _count(policy: Tree, key: str, default: int | None = None) -> int:
    value = get(policy, key, default)
    number = natural(str(value))
    if not number:
        fault = "is missing" if value is None else f"{value!r} is not a number of 1 or more"
        raise InputError(f"policy.{key}", fault, f"write policy.{key}=1, for example")
    return number


def _parallelism(config: Tree) -> list[str]:
    tensor = natural(str(config.get("tensor_model_parallel_size"))) or 1
    return ["--sequence-parallel"] if is_true(config.get("sequence_parallel")) and tensor > 1 else []


def _flex(config: Tree) -> list[str]:
    """The dispatcher with DeepEP or another backend, which only the flex dispatcher has."""
    if config.get("moe_token_dispatcher_type") != "flex":
        return []
    backend = config.get("moe_flex_dispatcher_backend")
    return ["--moe-flex-dispatcher-backend", str(backend)] if backend else ["--moe-enable-deepep"]


def _recompute(config: Tree) -> list[str]:
    """Recomputation, which activation_checkpointing switches on (`_apply_performance_config`)."""
    if not is_true(config.get("activation_checkpointing")):
        return []
    granularity = str(get(config, "recompute_granularity", "full"))
    if granularity == "full":
        return ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    modules = [str(each) for each in config.get("recompute_modules") or []]
    return ["--recompute-granularity", granularity, *(["--recompute-modules", *modules] if modules else [])]


def _fp8(config: Tree) -> list[str]:
    fp8 = table(config, "fp8_cfg")
    if not is_true(fp8.get("enabled")):
        return []
    words = ["--fp8-format", str(get(fp8, "fp8", "hybrid")), "--fp8-recipe", str(get(fp8, "fp8_recipe", "delayed"))]
    return [*words, *(["--fp8-param-gather"] if is_true(fp8.get("fp8_param")) else [])]


def _heads(config: Tree, found: Words, model: NamedModel) -> list[str]:
    """Prediction of several tokens, CUDA graphs and offloaded activations, if they are on."""
    for key in ("cuda_graph_impl", "fine_grained_activation_offloading"):
        if config.get(key) not in (None, "none", False):
            found.unknown.append(f"policy.megatron_cfg.{key}")
    layers = config.get("mtp_num_layers") or 0
    repeated = is_true(config.get("mtp_use_repeated_layer"))
    if layers and model.depth_letters:
        return _depths(model, natural(str(layers)) or 0, repeated=repeated)
    if layers and repeated and layers != 1:
        found.unknown.append("policy.megatron_cfg.mtp_use_repeated_layer")
    return ["--mtp-num-layers", str(layers)] if layers else []


def _depths(model: NamedModel, layers: int, *, repeated: bool) -> list[str]:
    """The pattern of a hybrid model with its MTP layers: `HybridModelProvider.finalize` of Bridge appends that of each depth."""
    pattern = "/".join([model.letters, *[model.depth_letters] * layers])
    return ["--hybrid-override-pattern", pattern, *(["--mtp-use-repeated-layer"] if repeated else [])]


def _optimizer(config: Tree, fields: Fields) -> Words:
    """The optimizer and its gradients."""
    found = fields.words(table(config, "optimizer"), ignored=_OF_OPTIMIZER, prefix="policy.megatron_cfg.optimizer.")
    gradients = table(config, "distributed_data_parallel_config")
    if not is_true(gradients.get("overlap_grad_reduce", False)):  # one bucket; Megatron-LM's arguments refuse to gather it early
        gradients = {key: value for key, value in gradients.items() if key != "overlap_param_gather"}
    found.add(fields.words(gradients, ignored=_OF_GRADIENTS, prefix="policy.megatron_cfg.distributed_data_parallel_config."))
    reduced = is_true(get(gradients, "grad_reduce_in_fp32", False))
    found.words.append("--accumulate-allreduce-grads-in-fp32" if reduced else "--grad-reduce-in-bf16")
    if is_true(get(gradients, "use_custom_fsdp", False)):
        found.unknown.append("policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp")
    return found


def _world(tree: Tree) -> tuple[World, list[str]]:
    """The GPUs that train: those of the cluster without those of a rollout elsewhere."""
    if not table(tree, "cluster"):
        raise InputError("cluster", "is missing", "write +cluster.gpus_per_node=8 +cluster.num_nodes=1, for example")
    nodes, gpus = get(tree, "cluster.num_nodes", 1), get(tree, "cluster.gpus_per_node", 1)
    for key, value in (("num_nodes", nodes), ("gpus_per_node", gpus)):
        if not natural(str(value)):
            raise InputError(f"cluster.{key}", f"{value!r} is not a number of 1 or more", f"write cluster.{key}=1, for example")
    colocated = get(tree, "policy.generation.colocated.enabled", True)
    if is_true(colocated) or not table(tree, "policy.generation"):
        return World(int(nodes), int(gpus)), []
    taken = table(tree, "policy.generation.colocated.resources")
    apart = natural(str(taken.get("num_nodes"))) or 0
    if int(nodes) > 1 and apart and apart < int(nodes):
        note = f"{apart} of {nodes} nodes generate, and the others train (policy.generation.colocated)."
        return World(int(nodes) - apart, int(gpus)), [note]
    alone = natural(str(taken.get("gpus_per_node"))) or 0
    if int(nodes) == 1 and alone and alone < int(gpus):
        note = f"{alone} of {gpus} GPUs generate, and the others train (policy.generation.colocated)."
        return World(1, int(gpus) - alone), [note]
    key = "policy.generation.colocated.resources"
    raise InputError(key, "does not leave GPUs for the training", "give num_nodes, or gpus_per_node on one node")


def _statements(tree: Tree, found: Words) -> Iterator[str]:
    yield from found.statements()
    config = table(tree, "policy.megatron_cfg")
    if is_true(config.get("freeze_moe_router")):
        yield "policy.megatron_cfg.freeze_moe_router: routers are counted as trained, so the prediction is slightly too high."
    if is_true(config.get("use_fused_linear_logprobs")):
        yield "policy.megatron_cfg.use_fused_linear_logprobs: whole logits are counted, so the prediction is too high."


_PROVIDER_FREEZES: Final = ("freeze_vision_model", "freeze_vision_projection", "freeze_sound_encoder", "freeze_sound_projection")


def _vision(config: Tree) -> VisionTraining:
    """What `freeze_config` freezes beside what the provider of the model does: false does not train it after all.

    Other settings are fields of the provider (`iter_vlm_config_overrides` of nemo_rl/models/megatron/community_import.py).
    """
    given = {name: value for name, value in table(config, "freeze_config").items() if is_true(value)}
    fields: Tree = {name: config[name] for name in _PROVIDER_FREEZES if name in config}
    return bridge_vision(fields | given, "policy.megatron_cfg.")


def _tuning(tree: Tree, method: str) -> FineTuning:
    """The method with its other models, adapters and frozen parts."""
    config = table(tree, "policy.megatron_cfg")
    given = {name: value for name, value in table(config, "peft").items() if name in _OF_ADAPTERS}
    adapter = bridge_adapter(given, "policy.megatron_cfg.peft")
    settings = {key: value for key, value in config.items() if key != "freeze_config"}
    frozen = frozen_parts({**table(config, "freeze_config"), **settings}, "policy.megatron_cfg")
    # samples are padded to the longest of their batch
    padded = not any(is_true(get(tree, f"policy.{packing}.enabled", False)) for packing in ("sequence_packing", "dynamic_batching"))
    if method in ("sft", ""):
        return FineTuning(adapter=adapter, frozen=frozen, longest_counted=padded)
    if method in ("dpo", "rm"):
        # the reference model is in host memory, and takes the place of the trained one before the update
        reference = (Phase(name="reference", weights="swapped"),) if method == "dpo" else ()
        return FineTuning(
            objective="preference" if method == "dpo" else "reward",
            method=_METHODS[method],
            adapter=adapter,
            frozen=frozen,
            phases=reference,
            sequences_per_sample=2,
            longest_counted=padded,
        )
    phases = [*_phases(tree)] if method != "distillation" else [*_rollout(tree), _teacher(tree)]
    if method == "ppo":
        phases.append(Phase(name="critic"))
    return FineTuning(
        objective="distillation" if method == "distillation" else "reinforcement",
        method=_METHODS[method],
        adapter=adapter,
        frozen=frozen,
        phases=tuple(phases),
        distillation=_loss(tree) if method == "distillation" else None,
    )


def _loss(tree: Tree) -> DistillationSpec:
    """The loss of a student (`DistillationLossFn` in algorithms/loss/loss_functions.py).

    Raises InputError for values that NeMo-RL refuses.
    """
    kind, topk = str(get(tree, "loss_fn.kl_type", "mixed")), get(tree, "distillation.topk_logits_k", 64)
    if kind not in _DIVERGENCES:
        raise InputError("loss_fn.kl_type", f"{kind!r} is not known", f"use one of {', '.join(_DIVERGENCES)}")
    number = natural(str(topk))
    if not number:
        raise InputError("distillation.topk_logits_k", f"{topk!r} is not a number of 1 or more", "use 64, for example")
    packed = is_true(get(tree, "policy.sequence_packing.enabled", False))
    if packed and is_true(get(tree, "policy.sequence_packing.fuse_loss", False)):
        fault = "NeMo-RL refuses it in distillation, whose loss reads one sequence at a time"
        raise InputError("policy.sequence_packing.fuse_loss", fault, "leave it out")
    return DistillationSpec(
        framework="NeMo-RL",
        divergence=_DIVERGENCES[kind],
        topk=number,
        sequences=_loss_sequences(tree),
        whole_vocabulary=is_true(get(tree, "loss_fn.zero_outside_topk", False)),
    )


def _teacher(tree: Tree) -> Phase:
    """The teacher, which is on the GPU for its pass only. Then the student is on the host. Its largest logits are stored there too.

    Sources: algorithms/distillation.py (`distillation_train`), models/policy/workers/megatron_policy_worker.py (`get_topk_logits`)
    and distributed/model_utils.py (`distributed_vocab_topk`).
    """
    teacher, config = table(tree, "teacher"), table(tree, "teacher.megatron_cfg")
    tokens, name = _logprob_tokens(teacher), teacher.get("model_name")
    if not is_true(config.get("enabled", False)) or not tokens or not isinstance(name, str):
        return Phase(name="teacher")
    layout = [*_UNPADDED]
    for key, option in _LAYOUT.items():
        size = natural(str(config.get(key)))
        layout += [option, str(size)] if size else []
    in_chunks = is_true(config.get("defer_fp32_logits", False)) and bool(teacher.get("logprob_chunk_size"))
    return Phase(
        name="teacher",
        weights="host",
        model_name=name,
        layout=(*layout, *_parallelism(config)),
        on_host=ALL_STATES,
        work=ForwardPass(tokens=tokens, logit_bytes=2 if in_chunks else 6),
    )


def _phases(tree: Tree) -> Iterator[Phase]:
    """The phases of reinforcement learning beside the update.

    Source: models/policy/workers/megatron_policy_worker.py (`prepare_for_lp_inference`, `use_reference_model`,
    `offload_before_refit`, `offload_after_refit`) and distributed/model_utils.py (`DistributedLogprob`).
    """
    policy = table(tree, "policy")
    away: set[StatePart] = {"gradients"}
    away |= {"optimizer"} if is_true(policy.get("offload_optimizer_for_logprob")) else set()
    tokens = _logprob_tokens(policy)
    # fp32 logits, less their maximum, and the exponentials; in chunks only the conversion to fp32, unless that is deferred
    deferred = is_true(get(policy, "megatron_cfg.defer_fp32_logits", False))
    each = (2 if deferred else 6) if policy.get("logprob_chunk_size") else 12
    work = ForwardPass(tokens=tokens, logit_bytes=each) if tokens else None
    yield Phase(name="log-probabilities", on_host=frozenset(away), work=work)
    if get(tree, "loss_fn.reference_policy_kl_penalty", 0):
        yield Phase(name="reference", weights="swapped", on_host=frozenset(away), work=work)
    yield from _rollout(tree)


def _logprob_tokens(policy: Tree) -> int | None:
    """Tokens of a microbatch of the pass for log-probabilities."""
    for packing in ("sequence_packing", "dynamic_batching"):
        if is_true(get(policy, f"{packing}.enabled", False)):
            return natural(str(get(policy, f"{packing}.logprob_mb_tokens", "")))
    length, samples = (natural(str(policy.get(key))) for key in ("max_total_sequence_length", "logprob_batch_size"))
    return length * samples if length and samples else None


def _rollout(tree: Tree) -> Iterator[Phase]:
    """The rollout and the refit. Only vLLM takes a given share of the GPU."""
    generation = table(tree, "policy.generation")
    colocated = is_true(get(generation, "colocated.enabled", True))
    share = share_of(str(get(generation, "vllm_cfg.gpu_memory_utilization", "")))
    engine = None
    if share is not None and get(generation, "backend", "vllm") == "vllm":
        engine = Engine(gpu_share=share, tensor=natural(str(get(generation, "vllm_cfg.tensor_parallel_size", 1))) or 1)
    away: set[StatePart] = {"gradients"}
    away |= {"optimizer"} if is_true(get(tree, "policy.offload_optimizer_for_refit", True)) else set()
    yield Phase(name="rollout", on_same_gpus=colocated, on_host=frozenset({"parameters", *away}), work=engine)
    yield Phase(name="refit", on_same_gpus=colocated, on_host=frozenset(away), work=engine)
