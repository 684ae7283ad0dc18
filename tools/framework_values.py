"""What examples of frameworks say of their layout, batch and model: values of keys, looked up without the readers of `analyzer`.

Scripts are not run. Their words are read with the values of the variables that they set, or with the defaults that they give
to variables of the environment. `tools/score_frameworks.py` compares these values with those of the program.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
_DATA: Final = json.loads((ROOT / "analyzer/launch/model_config/published.json").read_text(encoding="utf-8"))
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    name.lower(): each["config"] for first, each in _DATA["models"].items() for name in (first, *each.get("aliases", ()))
}
"""The fields of each config.json, by the name of the model in lower case."""
_FIRST: Final = {name.lower(): first for first, each in _DATA["models"].items() for name in (first, *each.get("aliases", ()))}
COUNTS: Final[dict[str, int]] = json.loads((ROOT / "tests/data/published_models.json").read_text(encoding="utf-8"))["parameters"]
"""Parameters of the model classes of transformers."""
VISION: Final[dict[str, dict[str, int]]] = json.loads((ROOT / "tests/data/published_models.json").read_text(encoding="utf-8"))[
    "vision"
]
"""Those of the encoder and of the projection of vision-language models."""
_ENDS: Final = re.compile(r"-(base|instruct|chat|thinking|fp8|bf16|mcore|2507|0528|2512|hf|it)$")

Tree = dict[str, Any]
Settings = dict[str, str]


@dataclass(kw_only=True)
class Values:
    """What an example says. None: it says nothing, or it is not looked up."""

    gpus: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    micro: int | None = None
    samples: int | None = None
    """Of a global batch."""
    length: int | None = None
    """Tokens of a sequence; of a packed microbatch."""
    precision: str | None = None
    model: str | None = None
    """Its name or folder."""
    layers: int | None = None
    hidden: int | None = None
    experts: int | None = None
    trained: str = "all"
    """all, adapters, or parts."""
    parameters: int | None = None
    """The trained ones."""
    frozen: frozenset[str] = frozenset()
    """Of a vision-language model: language_model, vision_model, vision_projection."""
    uneven: bool = False
    """The example says how layers are split over stages."""
    own_layers: bool = False
    """The model has layers that the framework adds to those of Megatron-LM."""

    @property
    def refused(self) -> str | None:
        """Why Megatron-LM refuses the launch; None if these values do not show it."""
        if self.layers is not None and self.layers % self.pipeline and not self.uneven:
            return f"{self.layers} layers in {self.pipeline} stages"
        groups = {"dense": self.tensor * self.pipeline * self.context}
        if self.experts:
            groups["expert"] = (self.expert_tensor or self.tensor) * self.expert * self.pipeline
        for name, size in groups.items():
            if self.gpus is not None and self.gpus % size:
                return f"{self.gpus} GPUs in {name} groups of {size}"
        return None


def config_of(name: str | None) -> tuple[str, Tree] | None:
    """The published model with the sizes of `name`, and its config.json; None if it is not known."""
    known = _named(name)
    return None if known is None else (known[0], _language_of(known[1]))


def _language_of(config: Tree) -> Tree:
    """The fields of the language model, which a vision-language model may have in a part of its config.json."""
    config = config.get("thinker_config") or config
    return {**config, **(config.get("text_config") or config.get("llm_config") or {})}


def _named(name: str | None) -> tuple[str, Tree] | None:
    last = (name or "").strip("/'\" }").lower()
    names = {each.rpartition("/")[2]: each for each in CONFIGS} | {each: each for each in CONFIGS}
    while last:
        for each in (last, last.rpartition("/")[2]):
            if each in names:
                return _FIRST[names[each]], CONFIGS[names[each]]
        shorter = _ENDS.sub("", last)
        last = shorter if shorter != last else ""
    return None


def frozen_by_bridge(name: str | None) -> frozenset[str]:
    """What a provider of Megatron-Bridge freezes unless it is told not to (`Qwen3VLMoEModelProvider`)."""
    known = config_of(name)
    frozen = known is not None and CONFIGS[known[0].lower()]["model_type"] == "qwen3_vl_moe"
    return frozenset({"language_model", "vision_model"} if frozen else ())


_FREEZES: Final = tuple(
    f"freeze_{part}" for part in ("language_model", "vision_model", "vision_projection", "sound_encoder", "sound_projection")
)
"""What freezes a part of a model for images or sound in NeMo-RL."""


def with_model(found: Values) -> Values:
    """`found` with the sizes of its published model, unless it has sizes."""
    known = config_of(found.model)
    if known is None:
        return found
    name, config = known
    pattern = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    found.layers = found.layers or (len(pattern) if pattern else config["num_hidden_layers"])
    found.hidden = found.hidden or config["hidden_size"]
    if found.experts is None:
        keys = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        found.experts = next((config[key] for key in keys if config.get(key)), 0)
    if name in VISION and "language_model" in found.frozen and found.trained == "all":
        found.trained = "parts"
    if found.trained != "adapters" and found.parameters is None and name in COUNTS:
        trained = {section: count for section, count in VISION.get(name, {}).items() if section not in found.frozen}
        language = 0 if "language_model" in found.frozen else COUNTS[name]
        found.parameters = language + sum(trained.values())
    return found


# Files ---------------------------------------------------------------------------------------------------------------------------


def _load(path: Path) -> Tree:
    class Loader(yaml.SafeLoader):
        """Reads 1e-5 as a number."""

    number = re.compile(r"[-+]?\d[\d_]*(?:\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    found = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    return found if isinstance(found, dict) else {}


def _merged(low: Tree, high: Tree) -> Tree:
    both = dict(low)
    for key, value in high.items():
        present = both.get(key)
        both[key] = _merged(present, value) if isinstance(present, dict) and isinstance(value, dict) else value
    return both


def _chain(path: Path, key: str, file_of: Callable[[Path, str], Path | None]) -> Tree:
    """A file after those that its `key` names."""
    tree = _load(path)
    named = tree.pop(key, None) or []
    merged: Tree = {}
    for each in [named] if isinstance(named, str) else named:
        below = file_of(path, each) if isinstance(each, str) else None
        merged = _merged(merged, _chain(below, key, file_of)) if below is not None and below.is_file() else merged
    return _merged(merged, tree)


def _at(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _whole(tree: Tree, path: str, default: int | None = None) -> int | None:
    """A whole number at `path`, with its references."""
    number = _number(tree, _at(tree, path))
    return default if number is None else number


def _number(tree: Tree, value: Any, depth: int = 0) -> int | None:
    if isinstance(value, bool) or value is None or depth > 8:
        return None
    if isinstance(value, int):
        return value
    text = str(value).strip()
    if re.fullmatch(r"[\d_]+", text):
        return int(text)
    inner = re.fullmatch(r"\$\{(?:(\w+):)?(.*)\}", text, re.DOTALL)
    if inner is None:
        return None
    if inner[1] is None:
        return _number(tree, _at(tree, inner[2].strip()), depth + 1)
    factors = [_number(tree, each, depth + 1) for each in _arguments(inner[2])]
    numbers = [each for each in factors if each is not None]
    if len(numbers) < len(factors):
        return None
    operations: dict[str, Callable[[list[int]], int]] = {
        "mul": math.prod, "add": sum, "max": max, "min": min, "div": lambda each: each[0] // each[1],
    }  # fmt: skip
    return operations[inner[1]](numbers) if inner[1] in operations else None


def _arguments(text: str) -> list[str]:
    """The parts of a text between commas outside braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


# NeMo-RL -------------------------------------------------------------------------------------------------------------------------


def nemo_rl(path: Path, _checkout: Path) -> Values:
    """`defaults` names the file that comes first. `cluster` has the GPUs, also those of a rollout that is not colocated."""
    tree = _chain(path, "defaults", lambda file, name: file.parent / name)
    engine = "policy.megatron_cfg."

    def size(name: str) -> int:
        return _whole(tree, f"{engine}{name}_parallel_size", 1) or 1

    nodes, each = _whole(tree, "cluster.num_nodes", 1) or 1, _whole(tree, "cluster.gpus_per_node", 1) or 1
    gpus = nodes * each
    if _at(tree, "policy.generation.colocated.enabled") is False:
        apart = "policy.generation.colocated.resources."
        of_nodes, of_gpus = _whole(tree, f"{apart}num_nodes"), _whole(tree, f"{apart}gpus_per_node")
        gpus -= (of_nodes or 1) * (of_gpus or each) if nodes > 1 else of_gpus or 0
    found = Values(
        gpus=gpus,
        tensor=size("tensor_model"),
        pipeline=size("pipeline_model"),
        context=size("context"),
        expert=size("expert_model"),
        expert_tensor=size("expert_tensor"),
    )
    found.model = str(_at(tree, "policy.model_name"))
    found.precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(_at(tree, "policy.precision")))
    pairs = 2 if "dpo" in tree else 1
    samples, micro = (_whole(tree, f"policy.train_{kind}_batch_size", 1) or 1 for kind in ("global", "micro"))
    length = _whole(tree, "policy.max_total_sequence_length", 1) or 1
    batches(found, samples * pairs, micro * pairs, length)
    for packing in ("sequence_packing", "dynamic_batching"):
        if _at(tree, f"policy.{packing}.enabled") is True:
            packed(found, samples * pairs, length, _whole(tree, f"policy.{packing}.train_mb_tokens", 0) or 0)
            break
    found.uneven = any(_at(tree, f"{engine}num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    given = {**(_at(tree, engine.removesuffix(".")) or {}), **(_at(tree, f"{engine}freeze_config") or {})}
    frozen = {key.removeprefix("freeze_") for key, value in given.items() if value is True and key in _FREEZES}
    found.frozen = frozen_by_bridge(found.model) | {"sound_model" if each == "sound_encoder" else each for each in frozen}
    if _at(tree, f"{engine}peft.enabled") is True:
        found.trained = "adapters"
    return with_model(found)


def batches(found: Values, samples: int, micro: int, length: int) -> None:
    found.samples, found.micro, found.length = samples, micro, length


def packed(found: Values, samples: int, length: int, tokens: int) -> None:
    """Microbatches of `tokens` tokens, as many as `samples` sequences of `length` tokens fill on each replica."""
    if tokens and found.gpus:
        replicas = max(1, found.gpus // (found.tensor * found.pipeline * found.context))
        batches(found, math.ceil(samples * length / (tokens * replicas)) * replicas, 1, tokens)


# Primus --------------------------------------------------------------------------------------------------------------------------

_VARIABLE: Final = re.compile(r"\$\{\w+:([^}]*)\}")


def primus(path: Path, checkout: Path) -> Values:
    """The module's file, the model's file and the overrides, in this order. Variables of the environment have their defaults."""
    module = next(iter(_load(path)["modules"].values()))
    configs = checkout / "primus/configs"
    merged: Tree = {}
    for kind, key in (("modules", "config"), ("models", "model")):
        file = configs / kind / "megatron" / _VARIABLE.sub(r"\1", str(module[key]))
        merged = _merged(
            merged, _chain(file if file.suffix else file.with_suffix(".yaml"), "extends", lambda f, name: f.parent / name)
        )
    merged = _merged(merged, module.get("overrides") or {})
    flat = {key: _scalar(value) for key, value in merged.items()}

    def size(key: str, default: int = 1) -> int:
        return int(flat.get(key) or default)

    found = Values(
        tensor=size("tensor_model_parallel_size"), pipeline=size("pipeline_model_parallel_size"),
        context=size("context_parallel_size"), expert=size("expert_model_parallel_size"),
        expert_tensor=flat.get("expert_tensor_parallel_size") or size("tensor_model_parallel_size"),
        micro=size("micro_batch_size"), samples=size("global_batch_size"), length=size("seq_length"),
        precision="bf16" if flat.get("bf16") else "fp16" if flat.get("fp16") else "fp32",
        layers=size("num_layers"), hidden=size("hidden_size"), experts=size("num_experts", 0),
    )  # fmt: skip
    keys = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout")
    found.uneven = any(flat.get(key) for key in keys)
    spec = flat.get("spec")
    found.own_layers = isinstance(spec, list) and "core.models.hybrid" in str(spec[0])
    found.parameters = _without_embeddings(flat)
    return found


def _without_embeddings(flat: Tree) -> int | None:
    """Parameters of the layers of a GPT and the last norm: the file does not say how large the vocabulary is. None for hybrids."""
    others = ("linear_attention_freq", "is_hybrid_model", "hybrid_override_pattern")
    if flat.get("model_type") == "mamba" or any(flat.get(key) for key in others):
        return None
    hidden, layers, heads = flat["hidden_size"], flat["num_layers"], flat["num_attention_heads"]
    norm = hidden * (2 if flat.get("normalization") == "LayerNorm" else 1)
    routed = _routed(flat.get("moe_layer_freq"), layers) if flat.get("num_experts") else 0
    gated = 3 if flat.get("swiglu") else 2
    ffn = flat.get("ffn_hidden_size") or 4 * hidden
    attention = _latent(flat, hidden, heads) if flat.get("multi_latent_attention") else _grouped(flat, hidden, heads)
    experts = 0
    if routed:
        small, shared = flat.get("moe_ffn_hidden_size") or ffn, flat.get("moe_shared_expert_intermediate_size") or 0
        experts = flat["num_experts"] * (hidden + gated * hidden * small) + gated * hidden * shared
    return int(layers * (attention + 2 * norm) + (layers - routed) * gated * hidden * ffn + routed * experts + norm)


def _grouped(flat: Tree, hidden: int, heads: int) -> int:
    """Parameters of attention with groups of heads."""
    size = flat.get("kv_channels") or hidden // heads
    groups = flat.get("num_query_groups") or heads
    wide = (heads + 2 * (groups if flat.get("group_query_attention") else heads)) * size
    norms = 2 * size if flat.get("qk_layernorm") else 0
    return int(hidden * wide + (wide if flat.get("add_qkv_bias") else 0) + heads * size * hidden + norms)


def _latent(flat: Tree, hidden: int, heads: int) -> int:
    """Parameters of multi-latent attention."""
    own, turned = flat["qk_head_dim"], flat["qk_pos_emb_head_dim"]
    query, key, value = flat.get("q_lora_rank"), flat["kv_lora_rank"], flat["v_head_dim"]
    norms = (key + (query or 0)) if flat.get("qk_layernorm") else 0
    up = heads * (own + turned)
    of_query = hidden * query + query * up if query else hidden * up
    return int(of_query + hidden * (key + turned) + key * heads * (own + value) + heads * value * hidden + norms)


def _routed(frequency: Any, layers: int) -> int:
    """The number of layers with experts."""
    if isinstance(frequency, str):
        whole = re.fullmatch(r"\d+", frequency)
        parts = re.findall(r"\(\[([\d,]+)\]\*(\d+)\)|\[([\d,]+)\](?:\*(\d+))?", frequency)
        frequency = (
            int(frequency) if whole else [int(each) for a, b, c, d in parts for each in (a or c).split(",") * int(b or d or 1)]
        )
    if isinstance(frequency, list):
        return sum(frequency)
    return sum(1 for layer in range(layers) if layer % (frequency or 1) == 0)


def _scalar(value: Any) -> Any:
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    text = _VARIABLE.sub(r"\1", value)
    return int(text) if text.isdecimal() else {"true": True, "false": False, "null": None}.get(text.lower(), text)


def _devices(tree: Tree, mapping: str) -> int | None:
    """The number of GPUs that an expression of ROLL lists."""
    referred = re.fullmatch(r"\$\{(.*)\}", mapping)
    text = str(_at(tree, referred[1])) if referred else mapping
    ranges = re.findall(r"range\((?:(\d+)\s*,\s*)?(\d+)\)", text)
    lists = re.findall(r"\[([\d\s,]+)\]", text)
    return sum(int(end) - int(start or 0) for start, end in ranges) + sum(len(each.split(",")) for each in lists) or None


# ROLL ----------------------------------------------------------------------------------------------------------------------------


def roll(path: Path, _checkout: Path) -> Values | None:
    """The worker with the strategy megatron_train. None if another engine trains."""

    def file_of(file: Path, name: str) -> Path:
        name = name.partition("@")[0]
        return file.parent / (name if name.endswith(".yaml") else f"{name}.yaml")

    tree = _chain(path, "defaults", file_of)
    roles = ("actor_train", "student_train", "student", "sft_train", "dpo_train")
    role = next((each for each in roles if _at(tree, f"{each}.strategy_args.strategy_name") == "megatron_train"), None)
    if role is None:
        return None
    config = f"{role}.strategy_args.strategy_config."
    mapping = str(_at(tree, f"{role}.device_mapping"))
    found = Values(
        gpus=_devices(tree, mapping),
        tensor=_whole(tree, f"{config}tensor_model_parallel_size", 1) or 1,
        pipeline=_whole(tree, f"{config}pipeline_model_parallel_size", 1) or 1,
        context=_whole(tree, f"{config}context_parallel_size", 1) or 1,
        expert=_whole(tree, f"{config}expert_model_parallel_size", 1) or 1,
        expert_tensor=_whole(tree, f"{config}expert_tensor_parallel_size"),
    )
    dtype = _at(tree, f"{role}.model_args.dtype")
    found.precision = {"bf16": "bf16", "fp16": "fp16", None: "bf16"}.get(dtype)
    model = _at(tree, f"{role}.model_args.model_name_or_path")
    found.model = str(tree.get("pretrain") if str(model).startswith("${") or not model else model)
    pairs = 2 if "chosen_key" in tree else 1
    micro = (_whole(tree, f"{role}.training_args.per_device_train_batch_size", 1) or 1) * pairs
    steps = _whole(tree, f"{role}.training_args.gradient_accumulation_steps", 1) or 1
    length = _whole(tree, "sequence_length") or sum(_whole(tree, f"{each}_length", 0) or 0 for each in ("prompt", "response"))
    samples = micro * steps * ((found.gpus or 1) // (found.tensor * found.pipeline * found.context))
    batches(found, samples, micro, length)
    if _at(tree, f"{role}.use_dynamic_batching_in_train") is True:
        packed(found, samples, length, _whole(tree, f"{role}.max_tokens_per_microbatch_in_train", 0) or 0)
    elif _at(tree, f"{role}.use_sequence_packing") is True:
        found.micro = found.samples = found.length = None
    if _at(tree, f"{role}.model_args.freeze_module_prefix") == "vision_model":
        found.frozen = frozenset({"vision_model", "vision_projection"})
    if _at(tree, f"{role}.model_args.lora_target") or _at(tree, f"{role}.model_args.lora_rank"):
        found.trained = "adapters"
    keys = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")
    found.uneven = any(_at(tree, f"{config}{key}") or _at(tree, f"{config}additional_configs.{key}") for key in keys)
    return with_model(found)
