"""What the scripts of ms-swift, slime and verl say, as `tools/framework_values.py` does for configurations.

The text is read line by line: variables that it sets, and words that it gives. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.framework_values import COUNTS, Settings, Values, batches, config_of, frozen_by_bridge, packed, with_model

_ASSIGNED: Final = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\$\(\(.*\)\)|\$\{.*\}|[^\s\"'(;]*)(?=\s|;|$)")
_REFERENCE: Final = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_SUM: Final = re.compile(r"\$\(\(\s*([\d\s+*/()-]+?)\s*\)\)")
_BARE: Final = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_HYDRA: Final = re.compile(r"(?<![\w.])\+{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(\"[^\"]*\"|'[^']*'|[^\s\"')]*)")
_TRUE: Final = ("true", "True")
_COUNTED: Final = ("slime_plugins.models.qwen3_5", "slime_plugins.models.glm5.glm5")
"""Plugins of slime that build the modules of the model class of transformers."""


def _lines(path: Path, folder: Path) -> Iterator[str]:
    """The lines of a script and of those that it sources, without comments; those that a backslash joins are one."""
    text = re.sub(r"(?m)^\s*#.*$|\s#\s.*$", "", path.read_text(encoding="utf-8"))
    for line in re.sub(r"\\\n", " ", text).splitlines():
        sourced = re.match(r"\s*(?:source|\.)\s+\"?\$\{?\w+\}?/(?:\.\./)*(?:scripts/)?([\w./-]+)\"?", line)
        if sourced and (folder / sourced[1]).is_file():
            yield from _lines(folder / sourced[1], folder)
        else:
            yield line


def _expanded(text: str, known: Settings) -> str:
    """`text` with the values of variables, and sums of numbers."""
    for _ in range(6):
        before = text
        text = _REFERENCE.sub(lambda found: known.get(found[1] or found[3]) or (found[0] if found[2] is None else found[2]), text)
        text = _BARE.sub(lambda found: "$((" + _NAME.sub(lambda name: known.get(name[0], name[0]), found[1]) + "))", text)
        text = _SUM.sub(lambda found: str(_value(found[1])), text)
        if text == before:
            break
    return text.strip("\"'")


def _value(text: str) -> int:
    """A sum or product of whole numbers; the text has digits and operators only."""
    return int(eval(text.replace("/", "//"), {"__builtins__": {}}))


def variables(path: Path, folder: Path) -> tuple[Settings, list[str]]:
    """The variables of a script with their first values, and its lines."""
    known: Settings = {}
    lines = list(_lines(path, folder))
    for line in lines:
        for name, value in _ASSIGNED.findall(line if re.match(r"\s*(?:export\s+)?[A-Za-z_]\w*=", line) else ""):
            if known.get(name) in (None, "", "0"):
                known[name] = _expanded(value, known)
    return known, lines


def _flags(lines: list[str], known: Settings) -> Settings:
    """The values of `--flag value`; empty for a flag without one."""
    found: Settings = {}
    for line in lines:
        words = _expanded(line, known).split()
        for position, word in enumerate(words):
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                following = next(iter(words[position + 1 : position + 2]), "")
                found[name[2:].replace("-", "_")] = (
                    value if equals else "" if following.startswith("--") else following.strip("\"')")
                )
    return found


def _whole(settings: Settings, *names: str, default: int = 1) -> int:
    for name in names:
        text = settings.get(name, "")
        if re.fullmatch(r"\d+", text):
            return int(text)
    return default


def ms_swift(path: Path, checkout: Path) -> Values:
    """`megatron sft`: all flags have values. Experts are not split by tensor parallelism unless it is said."""
    known, lines = variables(path, checkout)
    start = next(index for index, line in enumerate(lines) if re.search(r"\bmegatron (sft|pt|rlhf)\b", line))
    given = _flags([lines[start]], known)
    before = lines[start].partition("megatron ")[0]
    for name, value in _ASSIGNED.findall(before):
        known[name] = value
    pairs = 2 if given.get("rlhf_type") in ("dpo", "rm") else 1  # a chosen and a rejected sequence
    found = Values(
        gpus=_whole(known, "NPROC_PER_NODE") * _whole(known, "NNODES"),
        tensor=_whole(given, "tensor_model_parallel_size"),
        pipeline=_whole(given, "pipeline_model_parallel_size"),
        context=_whole(given, "context_parallel_size"),
        expert=_whole(given, "expert_model_parallel_size"),
        expert_tensor=_whole(given, "expert_tensor_parallel_size"),
        micro=_whole(given, "micro_batch_size") * pairs,
        samples=_whole(given, "global_batch_size", default=16) * pairs,
        length=_whole(given, "max_length", default=0) or None,
        precision="bf16",
    )
    found.model = _expanded(given.get("model", given.get("mcore_model", "")), known)
    sections = {
        "freeze_llm": ("language_model",),
        "freeze_vit": ("vision_model", "sound_model"),
        "freeze_aligner": ("vision_projection", "sound_projection"),
    }
    defaults = {"freeze_llm": "false"}
    frozen = (flag for flag in sections if given.get(flag, defaults.get(flag, "true")) == "true")
    found.frozen = frozenset(each for flag in frozen for each in sections[flag])
    found.uneven = any(name.startswith("decoder_") or name == "pipeline_model_parallel_layout" for name in given)
    if given.get("tuner_type", given.get("train_type", "full")) != "full":
        found.trained = "adapters"
        found.parameters = _adapters(found, _whole(given, "lora_rank", default=8), lines[start])
    found = with_model(found)
    known_model = config_of(found.model)
    outputs = {"seq_cls": _whole(given, "num_labels", default=2), "embedding": 0}.get(given.get("task_type", ""))
    if outputs is not None and found.trained == "all" and found.parameters and known_model is not None:
        rows = 0 if known_model[1].get("tie_word_embeddings") else int(known_model[1]["vocab_size"])
        found.parameters += (outputs - rows) * int(known_model[1]["hidden_size"])
    return found


def _adapters(found: Values, rank: int, line: str) -> int | None:
    """Parameters of LoRA beside plain attention, and with all-linear also beside every expert; None for other models."""
    named = re.search(r"--target_modules ((?:(?!--)\S+\s+)+)", line)
    targets = named[1].split() if named else ["all-linear"]
    known = config_of(found.model)
    if known is None or "--mtp_num_layers" in line or any("norm" in each or "router" in each for each in targets):
        return None
    config = known[1]
    if any(key in config for key in ("kv_lora_rank", "q_lora_rank", "linear_num_value_heads", "hybrid_override_pattern")):
        return None
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    groups = int(config.get("num_key_value_heads") or heads)
    every = "all-linear" in targets
    layer = 0
    if every or "linear_qkv" in targets:
        layer += rank * (hidden + (heads + 2 * groups) * size)
    if every or "linear_proj" in targets:
        layer += rank * (heads * size + hidden)
    dense, routed = layer, layer
    if every or "linear_fc1" in targets:
        ffn: int = config.get("intermediate_size", 0)
        experts = int(config.get("num_experts") or config.get("n_routed_experts") or 0)
        small: int = config.get("moe_intermediate_size", 0)
        dense += rank * (hidden + 2 * ffn) + rank * (ffn + hidden)
        routed += experts * (rank * (hidden + 2 * small) + rank * (small + hidden))
        shared = config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * small
        routed += rank * (hidden + 2 * shared) + rank * (shared + hidden) if shared else 0
    first = config.get("first_k_dense_replace", 0) if has_experts(config) else config["num_hidden_layers"]
    return int(first * dense + (config["num_hidden_layers"] - first) * routed)


def has_experts(config: dict[str, object]) -> bool:
    """Whether a config.json has experts."""
    return any(config.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))


def slime(path: Path, checkout: Path) -> Values:
    """Options of Megatron-LM, of which MODEL_ARGS has the sizes, and those of slime."""
    known, lines = variables(path, checkout / "scripts")
    given = _flags(lines, known)
    tensor = _whole(given, "tensor_model_parallel_size")
    found = Values(
        gpus=_whole(given, "actor_num_nodes") * _whole(given, "actor_num_gpus_per_node", default=8),
        tensor=tensor,
        pipeline=_whole(given, "pipeline_model_parallel_size"),
        context=_whole(given, "context_parallel_size"),
        expert=_whole(given, "expert_model_parallel_size"),
        expert_tensor=_whole(given, "expert_tensor_parallel_size", default=tensor),
        precision="bf16",
        layers=_whole(given, "num_layers"),
        hidden=_whole(given, "hidden_size"),
        experts=_whole(given, "num_experts", default=0),
    )
    most = _whole(given, "max_tokens_per_gpu", default=0)
    if "use_dynamic_batch_size" in given and most:
        found.micro, found.length = 1, most * found.context
    elif "micro_batch_size" in given:
        found.micro = _whole(given, "micro_batch_size")
    found.uneven = any(name.startswith("decoder_") and name.endswith("_layers") for name in given)
    found.own_layers = given.get("spec", "").startswith("slime_plugins") and not given["spec"].startswith(_COUNTED)
    named = config_of(given.get("hf_checkpoint"))
    same = named is not None and (named[1].get("num_hidden_layers"), named[1].get("hidden_size")) == (found.layers, found.hidden)
    if named is not None and same and "mtp_num_layers" not in given and not any("only_train" in name for name in given):
        found.parameters = COUNTS.get(named[0])
    return found


def verl(path: Path, checkout: Path) -> Values | None:
    """Settings of Hydra. None for a script that starts no training with Megatron-LM."""
    known, lines = variables(path, checkout)
    text = "\n".join(lines)
    given: Settings = {}
    for name, value in _HYDRA.findall(text):  # the first value, which is that of Nvidia's GPUs
        if "." in name or name in ("engine", "model_engine"):
            given.setdefault(name, _expanded(value, known))
    tuning = "verl.trainer.sft_trainer" in text
    if "verl.trainer" not in text or not (tuning or any("megatron" in each for each in (*given, *given.values()))):
        return None
    actor = "actor_rollout_ref.actor."
    engine, model = ("engine.", "model.") if tuning else (f"{actor}megatron.", "actor_rollout_ref.model.")
    tensor = _whole(given, f"{engine}tensor_model_parallel_size")
    found = Values(
        gpus=_whole(given, "trainer.nnodes") * _whole(given, "trainer.n_gpus_per_node", default=8),
        tensor=tensor,
        pipeline=_whole(given, f"{engine}pipeline_model_parallel_size"),
        context=_whole(given, f"{engine}context_parallel_size"),
        expert=_whole(given, f"{engine}expert_model_parallel_size"),
        expert_tensor=_whole(given, f"{engine}expert_tensor_parallel_size", default=tensor),
        precision="bf16",
        model=given.get(f"{model}path"),
    )
    if tuning:
        nodes = re.search(r"--nnodes[= ](\S+)", text)
        each = re.search(r"--nproc[_-]per[_-]node[= ](\S+)", text)
        found.gpus = _number(nodes[1] if nodes else "1", known) * _number(each[1] if each else "1", known)
        samples, length = _whole(given, "data.train_batch_size", default=256), _whole(given, "data.max_length", default=1024)
        tokens = _whole(given, "data.max_token_len_per_gpu", default=8192)
        if given.get("data.use_dynamic_bsz", "True") in _TRUE:
            packed(found, samples, length, tokens * found.context)
        else:
            batches(found, samples, _whole(given, "data.micro_batch_size_per_gpu", default=4), length)
    else:
        _batch_of_actor(found, given)
    if any(_whole(given, f"{model}{name}", default=0) for name in ("lora.rank", "lora_rank")):
        found.trained = "adapters"
    vanilla = given.get(f"{engine}vanilla_mbridge") in _TRUE
    found.frozen = frozenset() if vanilla else frozen_by_bridge(found.model)
    found.uneven = any(re.search(r"num_layers_in_(first|last)|pipeline_model_parallel_layout", name) for name in given)
    return with_model(found)


def _number(text: str, known: Settings) -> int:
    expanded = _expanded(text, known)
    return int(expanded) if expanded.isdecimal() else 1


def _batch_of_actor(found: Values, given: Settings) -> None:
    actor = "actor_rollout_ref.actor."
    length = _whole(given, "data.max_prompt_length", default=512) + _whole(given, "data.max_response_length", default=512)
    samples = _whole(given, f"{actor}ppo_mini_batch_size", default=256) * _whole(given, "actor_rollout_ref.rollout.n")
    if given.get(f"{actor}use_dynamic_bsz") in _TRUE:
        packed(found, samples, length, _whole(given, f"{actor}ppo_max_token_len_per_gpu", default=16384) * found.context)
    else:
        batches(found, samples, _whole(given, f"{actor}ppo_micro_batch_size_per_gpu"), length)
