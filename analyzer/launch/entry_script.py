"""The training script, which is between torchrun's options and Megatron's: which model it trains.

Megatron's own scripts train a GPT, BERT, T5 or a vision-language model. Any other script is assumed to train a GPT, unless its name
or its options show another model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.hybrid import STACKS
from analyzer.launch.inference.options import DYNAMIC_SCRIPTS, STATIC_SCRIPTS
from analyzer.launch.info_options import MODEL
from analyzer.launch.options.script_options import script_of
from analyzer.specs import Family

GPT_SCRIPT: Final = "pretrain_gpt"
HYBRID_SCRIPTS: Final = ("pretrain_mamba", "pretrain_hybrid")
HYBRID: Final = "a Mamba hybrid"
FAMILIES: Final[dict[str, Family]] = {
    GPT_SCRIPT: "gpt",
    "pretrain_bert": "bert",
    "pretrain_t5": "t5",
    "pretrain_vlm": "llava",
    "multimodal/train": "llava",
    "mimo/train": "mimo",
}
"""Megatron's own training scripts, and the family of the models that they train."""
OTHER_MODELS: Final[dict[str, str]] = {
    "bert": "BERT",
    "t5": "T5",
    "ict": "the ICT retriever",
    "biencoder": "a biencoder",
    "realm": "a retriever",
    "orqa": "a retriever",
    "retro": "RETRO",
    "mamba": HYBRID,
    "hybrid": HYBRID,
    "zamba": "a Mamba hybrid",
    "vlm": "a vision-language model",
    "vl": "a vision-language model",
    "llava": "a vision-language model",
    "clip": "a vision-language model",
    "multimodal": "a multimodal model",
    "mimo": "a multimodal model",
    "omni": "a multimodal model",
    "vision": "a vision transformer",
    "vit": "a vision transformer",
    "dit": "a diffusion transformer",
    "flux": "a diffusion transformer",
    "rl": "reinforcement learning",
}
"""Words in names of scripts, and the models that they stand for."""
GENERIC_NAMES: Final = frozenset({"train", "pretrain", "finetune", "main", "run"})
"""Names of scripts that say nothing about the model. Their folder may."""
_VISION: Final = "a vision-language model"
OTHER_OPTIONS: Final[dict[str, str]] = {
    "--freeze-LM": _VISION,
    "--freeze-ViT": _VISION,
    "--language-model-type": _VISION,
    "--vision-model-type": _VISION,
    "--disable-vision-class-token": _VISION,
    "--allow-missing-vision-projection-checkpoint": _VISION,
    "--vision-pretraining": "a vision transformer",
    "--vision-backbone-type": "a vision transformer",
    "--num-classes": "a vision transformer",
    "--bert-no-binary-head": "BERT",
    "--titles-data-path": "the ICT retriever",
    "--biencoder-projection-dim": "a biencoder",
    "--biencoder-shared-query-context-model": "a biencoder",
    "--mask-prob": "BERT or T5",
    "--short-seq-prob": "BERT or T5",
    "--decoder-seq-length": "T5",
    "--decoder-num-layers": "T5",
    "--retro-add-retriever": "RETRO",
    "--hybrid-layer-pattern": HYBRID,
    "--hybrid-override-pattern": HYBRID,
    "--is-hybrid-model": HYBRID,
}
"""Options that only scripts of other models use."""
NO_TRAINING: Final = frozenset({
    "prune", "pruning", "quantize", "quantization", "ptq", "export", "convert", "converter", "conversion", "preprocess", "evaluate",
    "eval", "evaluation", "mmlu", "validate", "benchmark", "profile", "server", "merge", "tokenize",
})  # fmt: skip
"""Words in names of scripts that do something else than a training."""
NO_TRAINING_FOLDERS: Final = frozenset({"tools", "tasks"})
"""Folders of Megatron-LM with scripts that evaluate, convert and preprocess."""
SIZES: Final = frozenset({
    "num-layers", "encoder-num-layers", "hidden-size", "num-attention-heads", "use-checkpoint-args", "yaml-cfg", "model",
    "hf-checkpoint", "mcore-model", "load", "deepspeed-config",
})  # fmt: skip
"""Options, without dashes in front, of which every launch of Megatron-LM or of a fork has one: sizes, or where they are."""
_OTHER_PROVIDERS: Final = re.compile(r"llava|vlm|mimo|mamba|hybrid|bert|t5", re.IGNORECASE)
_REMEDY: Final = "use pretrain_gpt.py, pretrain_bert.py, pretrain_t5.py or pretrain_vlm.py"


def check_entry(entry: str, *, module: bool, options: Mapping[str, Sequence[str]]) -> str | None:
    """The statement about the script `entry` for the report; None for a script of Megatron's own.

    `module`: it is given as a module (`-m`). `options`: the flags of the command line with their values. Raises UnsupportedError
    for a script that trains another model.
    """
    folder, name = _folder_and_name(entry, module=module)
    if name == GPT_SCRIPT and _model_of_options(options) == HYBRID:
        raise InputError(entry, f"builds a GPT, and the options describe {HYBRID}", "use pretrain_mamba.py or pretrain_hybrid.py")
    if name in (*FAMILIES, *STATIC_SCRIPTS, *DYNAMIC_SCRIPTS) or script_of(entry) is not None:
        return None
    _refuse_no_training(entry, name, folder, options)
    model = _model_of_name(name, folder) or _model_of_options(options)
    if model == HYBRID:
        _check_hybrid(entry, name, options)
        return None
    if model is not None:
        fault = f"trains {model}, and other models than GPT are modelled for Megatron's own scripts only"
        raise UnsupportedError(entry, fault, _REMEDY)
    return f"{entry} is not a script of Megatron-LM: it is assumed to train a GPT as pretrain_gpt.py does."


def _check_hybrid(entry: str, name: str, options: Mapping[str, Sequence[str]]) -> None:
    """Raises InputError if no option describes the layers of a Mamba hybrid.

    Raises UnsupportedError for scripts that are not Megatron's.
    """
    described = _model_of_options(options) == HYBRID or "--hybrid-attention-ratio" in options or "--hybrid-mlp-ratio" in options
    if not described:
        raise InputError(
            entry,
            f"trains {HYBRID}, and no option describes its layers",
            "add --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec, and --hybrid-layer-pattern",
        )
    if name not in HYBRID_SCRIPTS:  # other programs give the letters of the pattern layers of their own, such as gated delta nets
        fault = f"trains {HYBRID}, and only those of Megatron's own scripts are modelled"
        raise UnsupportedError(entry, fault, "use pretrain_mamba.py if its layers are the same")


def family_of(entry: str | None) -> Family:
    """The family of the models that the script trains. `entry`: its path or the name of a module; None without a script."""
    if entry is None:
        return "gpt"
    written = entry.replace("\\", "/").removesuffix(".py")
    return FAMILIES.get(script_of(entry) or re.split(r"[/.]", written)[-1], "gpt")


def _folder_and_name(entry: str, *, module: bool) -> tuple[str, str]:
    path = entry.replace(".", "/") if module else entry.replace("\\", "/").removesuffix(".py")
    folder, _, name = path.rpartition("/")
    return folder, name


def refuse_other_program(argv: Sequence[str]) -> None:
    """Raises UnsupportedError if `argv` starts a program that is no launch of Megatron-LM: it has no size of a model.

    For launches that cannot be read, whose first fault would name an option of Megatron-LM that the program does not have.
    """
    from analyzer.launch.options.catalogue import load_catalogue
    from analyzer.launch.split_argv import split_argv

    words = split_argv(argv, load_catalogue().newest)
    entry = words.entry
    if entry is None or entry.startswith("verl.") or any(name == MODEL for name, _ in words.info):
        return
    name = entry.rpartition("/")[2].removesuffix(".py")
    names = {word.partition("=")[0].lstrip("-").replace("_", "-") for word in words.megatron if word.startswith("--")}
    if names & SIZES or GPT_SCRIPT in name or name in (*STATIC_SCRIPTS, *DYNAMIC_SCRIPTS):
        return
    fault = "is no launch of Megatron-LM: it gives neither sizes of a model nor a checkpoint that has them"
    raise UnsupportedError(entry, fault, "give a launch with options such as --num-layers, or the model with --info-model")


def _refuse_no_training(entry: str, name: str, folder: str, options: Mapping[str, Sequence[str]]) -> None:
    """Raises UnsupportedError for a script that evaluates, prunes, converts or serves a model."""
    remedy = "give the script that trains the model"
    if options.get("--task") and not options.get("--train-iters") and not options.get("--train-samples"):
        raise UnsupportedError("--task", f"{entry} runs the task {' '.join(options['--task'])}, which is no pretraining", remedy)
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    trains = any(word.startswith(("train", "pretrain", "finetun", "sft")) for word in words)
    if not trains and (words & NO_TRAINING or not NO_TRAINING_FOLDERS.isdisjoint(folder.split("/"))):
        raise UnsupportedError(entry, "does not train a model", remedy)


def _model_of_name(name: str, folder: str) -> str | None:
    """The other model that the name of the script stands for, or that of its folder if the name is a generic one."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    if words[0] in GENERIC_NAMES and len(words) == 1:
        words = re.split(r"[^a-z0-9]+", folder.rpartition("/")[2].lower())
    if "gpt" in words:
        return None
    return next((OTHER_MODELS[word] for word in words if word in OTHER_MODELS), None)


def _model_of_options(options: Mapping[str, Sequence[str]]) -> str | None:
    provider = " ".join(options.get("--model-provider", ()))
    if _OTHER_PROVIDERS.search(provider):
        return f"a model of the provider {provider}"
    if any(value in STACKS for value in options.get("--spec", ())):
        return HYBRID
    if any(value.startswith("BertWordPiece") for value in options.get("--tokenizer-type", ())):
        return "BERT"
    return next((model for flag, model in OTHER_OPTIONS.items() if flag in options), None)
