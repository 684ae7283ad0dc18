"""Configurations of ROLL (alibaba/ROLL) whose actor is trained by Megatron-LM (`strategy_name: megatron_train`).

Sources: roll/distributed/strategy/megatron_strategy.py, roll/configs, roll/pipeline/dpo/dpo_config.py, and training_args.py and
models/model_config.py of mcore_adapter, August 2026. Files are configurations of Hydra: `defaults` names files that come first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.batches import Batch, packed_batch, plain_batch, replicas_of
from analyzer.frameworks.models import named_model
from analyzer.frameworks.options import Fields, Words, is_true
from analyzer.frameworks.prepare import Input, Output
from analyzer.frameworks.recognize import YAML
from analyzer.frameworks.yaml_files import Files, Tree, get, merge, normal, of_file, override, resolve, table
from analyzer.launch.launchers.world import World
from analyzer.launch.megatron_words import LayoutSettings, MegatronWords
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.specs.fine_tuning import ALL_STATES, Adapter, Engine, FineTuning, ForwardPass, Objective, Phase, engine_name
from analyzer.specs.vision_part import VisionTraining
from analyzer.units import natural, share_of

_TRAINED: Final = ("actor_train", "student_train", "student", "sft_train", "dpo_train")
"""Keys of the worker that trains."""
_STRATEGY: Final = "megatron_train"
_DTYPES: Final = {"bf16": "--bf16", "fp16": "--fp16"}
_READ: Final = frozenset({
    "bf16", "fp16", "accumulate_allreduce_grads_in_fp32", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "moe_layer_recompute", "additional_configs", "optimizer", "virtual_pipeline_model_parallel_size",
    "max_grad_norm", "distrib_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient", "delay_grad_reduce",
    "save_hf_model", "save_merged_model", "ckpt_d2h_non_blocking", "sequence_packing", "compile_warmup",
    "check_for_nan_in_loss_and_grad", "moe_enable_routing_replay", "ckpt_format", "learning_rate",
})  # fmt: skip
"""Keys of strategy_config that are read here, or have no effect on memory."""
_MODEL_PARALLEL: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT_PARALLEL: Final = ("expert_model_parallel_size", "expert_tensor_parallel_size")
_UNEVEN: Final = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")
"""Splits of the layers that are not read for another worker."""
_FIXED: Final = ("--make-vocab-size-divisible-by", "1", "--no-create-attention-mask-in-dataloader")
"""The vocabulary is that of the checkpoint, and masks have one value for each token."""
_TOPK: Final = 64
"""Default of `logits_topk` (roll/pipeline/distill/distill_config.py)."""
_SAMPLES: Final = "training_args.per_device_train_batch_size"
_STEPS: Final = "training_args.gradient_accumulation_steps"
_PACKED: Final = "sequence_packing_args.max_packed_sequence_length_train"
_CONFIG: Final = "strategy_args.strategy_config"
_MOST_GPUS: Final = 1_000_000
_RANGE: Final = re.compile(r"list\(range\((?:(\d+)\s*,\s*)?(\d+)\)\)|(?:list\()?\[([\d\s,]*)\]\)?|\s*\+\s*")


def read(launch: Input) -> Output:
    """The training of the actor. Raises UnsupportedError if another engine than Megatron-LM trains."""
    name, words = _file(launch)
    tree = load(launch.folder / name, name, Files())
    rest = [word for word in override(tree, words, name) if not word.startswith("-")]
    if rest:
        raise InputError(rest[0], f"is no override of {name}", "write KEY=VALUE, such as sequence_length=4096")
    tree = resolve(tree, name, environ=launch.environ)
    role = next((key for key in _TRAINED if get(tree, f"{key}.strategy_args.strategy_name") == _STRATEGY), None)
    if role is None:
        given = next((get(tree, f"{key}.strategy_args.strategy_name") for key in _TRAINED if key in tree), None)
        fault = f"trains with {given or 'no strategy'}, and only training by Megatron-LM is modelled"
        raise UnsupportedError(name, fault, f"give a configuration whose strategy_name is {_STRATEGY}")
    variables = {**table(tree, "system_envs"), **table(tree, f"{role}.system_envs")}
    return Output(_words(tree, role, launch.folder), environ={key: str(value) for key, value in variables.items()})


def load(path: Path, name: str, files: Files) -> Tree:
    """The keys of a file, after those of the files in its `defaults`."""
    tree = files.tree(path, name)
    merged: Tree = {}
    defaults = tree.pop("defaults", None)
    for each in defaults if isinstance(defaults, list) else []:
        if not isinstance(each, str) or each == "_self_":
            continue
        file = each.partition("@")[0]
        below = normal(path.parent / (file if file.endswith(YAML) else f"{file}.yaml"))
        merge(merged, load(below, of_file(file, name), files))
    return merge(merged, tree)


def _file(launch: Input) -> tuple[str, list[str]]:
    """The configuration, and the overrides. Raises InputError for a script without one."""
    words = list(launch.found.words)
    program = launch.found.program
    if program.endswith(YAML):
        return program, words
    given: dict[str, str] = {}
    rest = []
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag in ("--config_path", "--config_name", "--config-path", "--config-name"):
            given[flag.replace("-", "_")] = value if equals or not words else words.pop(0)
        else:
            rest.append(flag + equals + value)
    folder, file = given.get("__config_path"), given.get("__config_name")
    if folder is None or file is None:
        raise InputError(program, "has no configuration", "add --config_path FOLDER --config_name NAME, or analyze the file itself")
    return str(Path(program).parent / folder / f"{file.removesuffix('.yaml')}.yaml"), rest


def _words(tree: Tree, role: str, folder: Path) -> MegatronWords:
    worker = table(tree, role)
    key, path = _model_path(tree, worker, role)
    model = named_model(key, path, folder=folder)
    config = table(worker, _CONFIG)
    world = _world(worker, role)
    fields = Fields(load_catalogue().newest)
    found = Words([*model.defaults, *_FIXED])
    dtype = "fp16" if is_true(config.get("fp16")) else str(get(worker, "model_args.dtype", "bf16"))
    found.words += [_DTYPES[dtype]] if dtype in _DTYPES else []
    if model.experts:
        found.words += ["--moe-token-dispatcher-type", str(get(config, "moe_token_dispatcher_type", "allgather"))]
    kept = {name: value for name, value in config.items() if name not in _READ and (model.experts or not name.startswith("moe_"))}
    prefix = f"{role}.strategy_args.strategy_config."
    found.add(fields.words(kept, prefix=prefix))
    found.add(fields.words(table(config, "additional_configs"), prefix=f"{prefix}additional_configs."))
    found.words += _recompute(config)
    found.words += _pipeline(config)
    reduced = is_true(config.get("accumulate_allreduce_grads_in_fp32"))
    found.words.append("--accumulate-allreduce-grads-in-fp32" if reduced else "--grad-reduce-in-bf16")
    batch = _batch(tree, worker, role, config, world)
    found.words += batch.words
    tuning = _tuning(tree, role, worker)
    return MegatronWords(
        words=tuple(found.words),
        model=model.name,
        world=world,
        notes=(f"The launch is one of ROLL: the update of {role} is analyzed.", *batch.notes),
        statements=found.statements(),
        unknown=tuple(found.unknown),
        withheld=tuple(found.withheld()),
        tuning=batch.tuned(replace(tuning, vision=_vision(worker, role))),
        layout=batch.layout,
    )


def _model_path(tree: Tree, worker: Tree, role: str) -> tuple[str, str]:
    """The setting with the model, and its value. Raises InputError if there is none."""
    settings = [(f"{role}.model_args.model_name_or_path", get(worker, "model_args.model_name_or_path"))]
    settings += [(key, tree.get(key)) for key in (*(["student_pretrain"] if role.startswith("student") else []), "pretrain")]
    for key, value in settings:
        if isinstance(value, str) and value:
            return key, value
    raise InputError("pretrain", "is missing", "add it, with a Hugging Face name or the folder of a config.json")


def _recompute(config: Tree) -> list[str]:
    """Recomputation: of all layers by default if it is full (`McaModelConfig.__post_init__`)."""
    granularity = config.get("recompute_granularity")
    modules = config.get("recompute_modules")
    if isinstance(modules, str):
        modules = modules.split(",")
    words = ["--recompute-granularity", str(granularity)] if granularity else []
    if granularity == "full":
        method, layers = config.get("recompute_method") or "uniform", config.get("recompute_num_layers") or 1
        words += ["--recompute-method", str(method), "--recompute-num-layers", str(layers)]
    elif granularity and modules:
        words += ["--recompute-modules", *(str(each).strip() for each in modules)]
    if is_true(config.get("moe_layer_recompute")) and granularity != "full":
        words.append("--moe-layer-recompute")
    return words


def _pipeline(config: Tree) -> list[str]:
    stages = natural(str(config.get("virtual_pipeline_model_parallel_size"))) or 1
    layout = config.get("pipeline_model_parallel_layout")
    return ["--num-virtual-stages-per-pipeline-rank", str(stages)] if stages > 1 and not layout else []


def _world(worker: Tree, role: str) -> World:
    """The GPUs of `device_mapping`. Raises InputError for an expression that is none."""
    text = str(worker.get("device_mapping"))
    devices = _devices(text)
    if not devices:
        raise InputError(f"{role}.device_mapping", f"{text!r} is no list of GPUs", "write list(range(0,8)), for example")
    return World.of(len(devices))


def _devices(text: str) -> list[int]:
    """The GPUs that a value of `device_mapping` lists; none if it is no such expression."""
    listed: list[int] = []
    end = 0
    for found in _RANGE.finditer(text):
        if found.start() != end:
            return []
        end = found.end()
        if found[2]:
            if int(found[2]) - int(found[1] or 0) > _MOST_GPUS:
                return []
            listed += range(int(found[1] or 0), int(found[2]))
        elif found[3] is not None:
            listed += [int(each) for each in found[3].split(",") if each.strip()]
    return listed if end == len(text) else []


def _batch(tree: Tree, worker: Tree, role: str, config: Tree, world: World) -> Batch:
    """Sequence length and batch sizes, and assumptions about them."""
    length = natural(str(tree.get("sequence_length")))
    if not length:
        length = sum(natural(str(tree.get(key))) or 0 for key in ("prompt_length", "response_length"))
    if not length:
        raise InputError("sequence_length", "is missing", "write sequence_length=4096, for example")
    micro = _count(worker, _SAMPLES, role)
    micro *= 2 if _is_preference(tree) else 1
    steps = _count(worker, _STEPS, role)
    tensor, pipeline, context = (natural(str(config.get(name))) or 1 for name in _MODEL_PARALLEL)
    replicas = replicas_of(world, tensor, pipeline, context)
    samples = micro * steps * replicas
    tokens, setting = _packing(worker, role, micro * length)
    layout = _layout_settings(tree, role, samples=samples)
    if tokens:
        if setting:
            layout = layout._replace(microbatch=setting, value=tokens, per_step=layout.value)
        stages = pipeline if config.get("virtual_pipeline_model_parallel_size") else 1
        named = setting or f"{role}.use_sequence_packing"
        batch = packed_batch(tokens, named, samples=samples, length=length, replicas=replicas, multiple=stages)._replace(
            layout=layout
        )
        padded = is_true(worker.get("use_dynamic_batching_in_train"))
        return batch._replace(longest_sample=None) if padded else batch
    note = f"Sequences are assumed to have {length} tokens, the longest of the configuration."
    return plain_batch(length, micro, samples, note=note, layout=layout)


def _layout_settings(tree: Tree, role: str, *, samples: int) -> LayoutSettings:
    """Where the layout is set. `samples`: sequences of an iteration. A reference model with the same layout keeps it."""
    worker, reference = table(tree, role), table(tree, "reference")
    value = _count(worker, _SAMPLES, role)
    return LayoutSettings(
        engine=f"{role}.{_CONFIG}.",
        mirrored=(f"reference.{_CONFIG}.",) if reference and _same_layout(reference, worker, experts=False) else (),
        microbatch=f"{role}.{_SAMPLES}",
        value=value,
        steps=f"{role}.{_STEPS}",
        samples=samples // (2 if _is_preference(tree) else 1),
    )


def _count(worker: Tree, key: str, role: str) -> int:
    """A number of 1 or more, which is also the default."""
    value = get(worker, key, 1)
    number = natural(str(value))
    if not number:
        raise InputError(f"{role}.{key}", f"{value!r} is not a number of 1 or more", f"write {role}.{key}=1, for example")
    return number


def _packing(worker: Tree, role: str, most: int) -> tuple[int, str]:
    """Tokens of a packed microbatch, 0 without packing, and the setting that gives them.

    It is empty if these are the tokens of its longest sequences, `most`.
    """
    if is_true(worker.get("use_dynamic_batching_in_train")):
        tokens = natural(str(worker.get("max_tokens_per_microbatch_in_train")))
        return tokens or most, f"{role}.max_tokens_per_microbatch_in_train"
    if not is_true(worker.get("use_sequence_packing")):
        return 0, ""
    balanced = get(worker, "sequence_packing_args.algorithm", "none") == "load_balance"
    tokens = natural(str(get(worker, _PACKED, ""))) if balanced else None
    return (tokens, f"{role}.{_PACKED}") if tokens else (most, "")


def _is_preference(tree: Mapping[str, Any]) -> bool:
    return "chosen_key" in tree or "rejected_key" in tree


def _vision(worker: Tree, role: str) -> VisionTraining:
    """The vision part, which is trained unless a prefix of its name freezes it."""
    prefixes = str(get(worker, "model_args.freeze_module_prefix") or "").split(",")
    setting = next(iter(_frozen(worker, role)), "")
    frozen = all(each.strip() in ("vision_model", "vision_model.") for each in prefixes)
    sections = ("vision_model", "vision_projection") if frozen else ()
    return VisionTraining(holder="ROLL", frozen=tuple((each, True, setting) for each in sections))


def _tuning(tree: Tree, role: str, worker: Tree) -> FineTuning:
    """Adapters, and the other models of the method."""
    adapter, frozen = _adapter(worker, role), _frozen(worker, role)
    if role == "sft_train":
        return FineTuning(adapter=adapter, frozen=frozen)
    if _is_preference(tree):
        phases = (Phase(name="reference"),)
        return FineTuning(
            objective="preference", method="DPO", adapter=adapter, frozen=frozen, phases=phases, sequences_per_sample=2
        )
    phases_of = [*_other_phases(tree, worker)]
    objective: Objective = "distillation"
    if role == "actor_train" or "actor_infer" in tree:
        objective = "reinforcement"
        tokens = _infer_tokens(tree, worker)
        # `state_offload_manger` loads the parameters only; fp32 logits and what their cross entropy and entropy make of them
        work = ForwardPass(tokens=tokens, logit_bytes=12) if tokens else None
        first = Phase(name="log-probabilities", on_host=frozenset({"gradients", "optimizer"}), work=work)
        phases_of = [first, *phases_of]
    estimator = str(tree.get("adv_estimator", "")).upper()
    method = {"GAE": "PPO"}.get(estimator, estimator) if objective == "reinforcement" else "distillation"
    return FineTuning(objective=objective, method=method, adapter=adapter, frozen=frozen, phases=tuple(phases_of))


def _other_phases(tree: Tree, worker: Tree) -> Iterator[Phase]:
    """The phases of other workers. Workers on the same GPUs move all of their states to the host after their work.

    Source: roll/pipeline/base_worker.py (`state_offload_manger`) and roll/pipeline/rlvr/rlvr_pipeline.py.
    """
    trained = str(worker.get("device_mapping"))
    of_training = {*_devices(trained)}
    for key, name in (("reference", "reference"), ("critic", "critic"), ("teacher", "teacher"), ("actor_infer", "rollout")):
        other = table(tree, key)
        if not other or (name == "critic" and tree.get("adv_estimator") != "gae"):
            continue
        same = not of_training.isdisjoint(_devices(str(other.get("device_mapping", trained))))
        if name == "reference":
            yield _reference(tree, worker, other, on_same_gpus=same)
        elif name == "rollout":
            engine = _engine(other)
            yield Phase(name="rollout", on_same_gpus=same, on_host=ALL_STATES, work=engine)
            yield Phase(name="refit", on_same_gpus=same, on_host=ALL_STATES - {"parameters"}, work=engine)
        elif name == "teacher":
            yield _teacher(tree, other, trained) if same else Phase(name="teacher", on_same_gpus=False, sent=_sent(tree))
        else:
            if str(get(other, "strategy_args.strategy_name")) == _STRATEGY:
                fault = f"{_STRATEGY} is refused by ROLL for critics (default_value_model_provider)"
                raise InputError("critic.strategy_args.strategy_name", fault, "use deepspeed_train or fsdp2_train")
            yield Phase(name="critic", on_same_gpus=same)
    yield from _rewards(tree, trained)


def _rewards(tree: Tree, trained: str) -> Iterator[Phase]:
    """Reward models: those on GPUs of the rollout work beside it, and are not counted. Rules have no GPUs."""
    of_training, of_rollout = {*_devices(trained)}, {*_devices(str(get(tree, "actor_infer.device_mapping", trained)))}
    for other in table(tree, "rewards").values():
        devices = _devices(str(other.get("device_mapping"))) if isinstance(other, dict) else []
        if devices:
            yield Phase(
                name="reward",
                on_same_gpus=not of_training.isdisjoint(devices),
                on_host=ALL_STATES,
                work=_engine(other) if of_rollout.isdisjoint(devices) else None,
            )


def _engine(worker: Tree) -> Engine | None:
    """The inference engine of a worker; None if it takes no given share of the GPU."""
    config = table(worker, _CONFIG)
    share = share_of(str(config.get("gpu_memory_utilization", config.get("mem_fraction_static", ""))))
    tensor = natural(str(config.get("tensor_parallel_size", worker.get("num_gpus_per_worker")))) or 1
    name = engine_name(str(get(worker, "strategy_args.strategy_name")))
    return Engine(name=name, gpu_share=share, tensor=tensor) if share is not None else None


def _reference(tree: Tree, worker: Tree, other: Tree, *, on_same_gpus: bool) -> Phase:
    """A reference model of Megatron-LM: the trained model, with the layout of the training or one of its own on the same GPUs."""
    tokens = _infer_tokens(tree, other)
    devices = [_devices(str(each.get("device_mapping", worker.get("device_mapping")))) for each in (other, worker)]
    same, config = _same_layout(other, worker), table(other, _CONFIG)
    readable = same or (len(devices[0]) == len(devices[1]) and not any(config.get(key) for key in _UNEVEN))
    if not (tokens and _is_megatron(other) and readable):
        return Phase(name="reference", on_same_gpus=on_same_gpus, on_host=ALL_STATES)
    experts = (natural(str(get(worker, f"{_CONFIG}.expert_model_parallel_size"))) or 1) > 1
    names = [get(each, "model_args.model_name_or_path") for each in (worker, table(tree, "actor_infer"), other)]
    name = names[2] if all(names) else tree.get("pretrain")  # `__post_init__` of roll/configs/base_config.py
    return Phase(
        name="reference",
        on_same_gpus=on_same_gpus,
        weights="host",
        model_name="" if same and name in (names[0], tree.get("pretrain")) else str(name),
        layout=() if same else tuple(_layout(config, experts=experts)),
        on_host=ALL_STATES,
        work=ForwardPass(tokens=tokens, logit_bytes=6),
    )


def _teacher(tree: Tree, worker: Tree, trained: str) -> Phase:
    """A teacher on the GPUs of the student. Unless states are offloaded, both stay there.

    Sources: roll/pipeline/distill/distill_worker.py,
    `is_offload_states` of roll/configs/base_config.py, and `op_compute_topk_probs_and_indices` of distributed/strategy/strategy.py:
    fp32 logits, and these by two temperatures.
    """
    config = table(worker, "strategy_args.strategy_config")
    name = get(worker, "model_args.model_name_or_path") or tree.get("teacher_pretrain")
    length, samples = (natural(str(each)) for each in (tree.get("sequence_length"), _count(worker, _SAMPLES, "teacher")))
    megatron = _is_megatron(worker)
    as_many = len(_devices(str(worker.get("device_mapping", trained)))) == len(_devices(trained))
    if not (megatron and as_many and isinstance(name, str) and length and samples and _topk(tree)):
        return Phase(name="teacher", sent=_sent(tree))
    moved = is_true(tree.get("is_offload_states"))
    return Phase(
        name="teacher",
        weights="host" if moved else "own",
        model_name=name,
        layout=tuple(_layout(config)),
        on_host=ALL_STATES if moved else frozenset(),
        work=ForwardPass(tokens=length * samples, logit_bytes=12),
        sent=_sent(tree),
    )


def _sent(tree: Tree) -> int:
    """Bytes of a token that a student gets: fp32 probabilities, their logarithms in 16 bit, indices, and which are infinite."""
    return _topk(tree) * (4 + 2 + 8 + 1) if "student" in tree else 0


def _topk(tree: Tree) -> int:
    return natural(str(get(tree, "logits_topk", _TOPK))) or 0


def _layout(config: Tree, *, experts: bool = False) -> Iterator[str]:
    """The options of the layout of another worker.

    `experts`: the model has experts, with which tensor parallelism needs sequence parallelism in training. ROLL turns it on with
    expert parallelism (`McaModelConfig.__post_init__`); a pass may do without.
    """
    experts = experts or (natural(str(config.get("expert_model_parallel_size"))) or 1) > 1
    yield from _FIXED[:2]
    for key in (*_MODEL_PARALLEL, *_EXPERT_PARALLEL):
        size = natural(str(config.get(key)))
        if size:
            yield from (f"--{key.replace('_', '-')}", str(size))
    for key in ("account_for_loss_in_pipeline_split", "account_for_embedding_in_pipeline_split"):
        if is_true(config.get(key)):
            yield f"--{key.replace('_', '-')}"
    yield from _pipeline(config)
    if (experts or is_true(config.get("sequence_parallel"))) and (natural(str(config.get("tensor_model_parallel_size"))) or 1) > 1:
        yield "--sequence-parallel"


def _infer_tokens(tree: Tree, worker: Tree) -> int | None:
    """Tokens of a microbatch without gradients."""
    if is_true(worker.get("use_dynamic_batching_in_infer")):
        return natural(str(worker.get("max_tokens_per_microbatch_in_infer")))
    length = sum(natural(str(tree.get(key))) or 0 for key in ("prompt_length", "response_length"))
    length = natural(str(tree.get("sequence_length"))) or length
    return (natural(str(worker.get("infer_batch_size"))) or 1) * length or None


def _is_megatron(worker: Tree) -> bool:
    return str(get(worker, "strategy_args.strategy_name")).startswith("megatron")


def _same_layout(worker: Tree, trained: Tree, *, experts: bool = True) -> bool:
    """Whether another worker runs Megatron-LM with the layout of the training, also of its `experts`."""
    if not _is_megatron(worker):
        return False
    layouts = (table(each, "strategy_args.strategy_config") for each in (worker, trained))
    names = (*_MODEL_PARALLEL, *(_EXPERT_PARALLEL if experts else ()))
    sizes = [tuple(natural(str(config.get(name))) or 1 for name in names) for config in layouts]
    return sizes[0] == sizes[1]


def _adapter(worker: Tree, role: str) -> Adapter | None:
    arguments = table(worker, "model_args")
    rank = natural(str(arguments.get("lora_rank")))
    if not rank or not arguments.get("lora_target"):
        return None
    targets = str(arguments["lora_target"]).split(",")
    alpha = arguments.get("lora_alpha")
    return Adapter(
        kind="lora",
        rank=rank,
        alpha=float(alpha) if isinstance(alpha, int | float) else None,
        targets=tuple(each.strip() for each in targets),
        source=f"{role}.model_args.lora_rank={rank}",
    )


def _frozen(worker: Tree, role: str) -> tuple[str, ...]:
    value = get(worker, "model_args.freeze_module_prefix")
    return (f"{role}.model_args.freeze_module_prefix={value}",) if value else ()
