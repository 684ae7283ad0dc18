"""Finds out what a python command runs, and whether that is a training."""

from __future__ import annotations

import os

VALUE_OPTIONS = frozenset("XW")
CERTAIN = ("pretrain", "train", "finetun", "sft", "posttrain", "megatron")
"""Beginnings of words in the name of a script that trains."""
OTHER = frozenset({
    "data", "dataset", "datasets", "tokenizer", "tokenize", "vocab", "prepare", "preprocess", "process", "download", "convert",
    "converter", "conversion", "checkpoint", "ckpt", "merge", "split", "eval", "evaluate", "test", "plot", "parse", "log", "logs",
    "generate", "generation", "inference", "server", "serve", "config", "args", "arguments", "submit", "hf2mcore", "mcore2hf",
    "hf2megatron", "megatron2hf", "hf", "utils", "report", "cost",
})  # fmt: skip
"""Words in the name of a script that does something else about a training."""
GENERATES = frozenset({
    "run_text_generation_server", "gpt_static_inference", "run_inference_performance_test", "run_dynamic_text_generation_server",
    "gpt_dynamic_inference", "gpt_dynamic_inference_with_coordinator",
})  # fmt: skip
"""Names of Megatron-LM's inference scripts, whose launches are analyzed too."""
MODEL_OPTIONS = frozenset({
    "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings", "--ffn-hidden-size",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--model-parallel-size",
})  # fmt: skip
TRAINING_OPTIONS = frozenset({
    "--micro-batch-size", "--global-batch-size", "--train-iters", "--train-samples", "--lr", "--min-lr", "--lr-decay-style",
    "--batch-size", "--use-distributed-optimizer",
})  # fmt: skip
CONFIGURED = frozenset({
    "run_grpo", "run_sft", "run_dpo", "run_rm", "run_ppo", "run_distillation", "run_vlm", "run_opd", "run_mopd", "run_async",
    "start_rlvr", "start_agentic", "start_sft", "start_dpo", "start_distill", "start_onpolicy",
})  # fmt: skip
"""Beginnings of the names of scripts of NeMo-RL and ROLL, whose configuration is in a file."""
OF_RECIPES = frozenset({"setup_experiment", "launch_with_nemo_run", "run_recipe"})
"""Names of scripts of Megatron-Bridge that start a recipe, whose configuration is in Python. The analysis says how to give it."""
CONFIG_OPTIONS = ("--config", "--config_name", "--config-name", "--config_path")
VERL_SETTINGS = "actor_rollout_ref."
"""Beginning of the settings of verl's actor."""
LAUNCHER_MODULES = {
    "torch.distributed.run": ["torch.distributed.run"],
    "torch.distributed.launch": ["torch.distributed.launch"],
    "torch.distributed.elastic.run": ["torch.distributed.run"],
    "accelerate.commands.launch": ["accelerate", "launch"],
    "deepspeed.launcher.runner": ["deepspeed"],
    "deepspeed": ["deepspeed"],
}
LAUNCHER_FILES = {
    "torch/distributed/run.py": ["torch.distributed.run"],
    "torch/distributed/launch.py": ["torch.distributed.launch"],
    "torch/distributed/elastic/run.py": ["torch.distributed.run"],
    "deepspeed/launcher/runner.py": ["deepspeed"],
    "accelerate/commands/launch.py": ["accelerate", "launch"],
}
"""Launchers by the end of their path."""
PREPARES = frozenset({
    "preprocess", "preprocessing", "convert", "converter", "conversion", "download", "downloader", "merge", "split", "tokenize",
    "tokenization", "prepare", "preparation", "hf2mcore", "mcore2hf", "hf2megatron", "megatron2hf",
})  # fmt: skip
"""Words in the name of a script that prepares data or a checkpoint."""
COMPUTES = frozenset({
    "args", "arguments", "options", "config", "configs", "env", "hosts", "hostfile", "ranks", "layers", "launch", "launcher", "run",
    "start", "submit", "command",
})  # fmt: skip
"""Words in the name of a script that computes something for the launch."""
SERVICE_MODULES = frozenset({"wandb", "gdown", "huggingface_hub", "modelscope", "awscli", "twine", "kaggle"})
"""Modules that need the network."""
DOWNLOAD_CALLS = ("snapshot_download(", "hf_hub_download(", "nltk.download(", "load_dataset(", "gdown.download(", "urlretrieve(")
"""Calls in the text after `python -c` that need the network."""
PROFILERS = frozenset({"coverage", "cProfile", "profile", "pdb", "memory_profiler", "scalene", "viztracer", "debugpy"})


class PythonCommand:
    """What a python command runs: `module` (-m), or `script`, with its `arguments`. Both are None for -c and standard input."""

    def __init__(self, script: str | None, module: str | None, arguments: list[str]) -> None:
        self.script = script
        self.module = module
        self.arguments = arguments


def read_python(words: list[str]) -> PythonCommand:
    """Reads the words after `python`."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-") or word == "-":
            return PythonCommand(None if word == "-" else word, None, words[position:])
        if word.startswith("--"):
            position += word == "--check-hash-based-pycs"
            continue
        for index, letter in enumerate(word[1:], 2):
            if letter == "c":
                return PythonCommand(None, None, [])
            if letter == "m":
                module = word[index:] or next(iter(words[position:]), "")
                return PythonCommand(None, module, words[position + (not word[index:]) :])
            if letter in VALUE_OPTIONS:
                position += not word[index:]
                break
    return PythonCommand(None, None, [])


def launch_of(words: list[str]) -> list[str] | None:
    """The command line of a launch, as the analysis reads it; None if `words` after `python` do not train."""
    command = read_python(words)
    if command.module in LAUNCHER_MODULES:
        return [*LAUNCHER_MODULES[command.module], *command.arguments]
    if command.module == "accelerate.commands.accelerate_cli":
        return ["accelerate", *command.arguments] if command.arguments[:1] == ["launch"] else None
    if command.module in PROFILERS:
        inner = next((index for index, word in enumerate(command.arguments) if word.endswith(".py")), None)
        return None if inner is None else launch_of(command.arguments[inner:])
    if command.script is not None:
        launcher = _launcher_by_path(command.script, command.arguments)
        if launcher is not None:
            return launcher
    if command.module is not None and trains(command.module.rpartition(".")[2], command.arguments):
        return ["-m", command.module, *command.arguments]
    if command.script is not None and trains(os.path.basename(command.script), command.arguments):
        return [command.script, *command.arguments]
    return None


def _launcher_by_path(script: str, arguments: list[str]) -> list[str] | None:
    """The launch of `python /usr/bin/torchrun …` or `python …/torch/distributed/run.py …`."""
    name = os.path.basename(script)
    if name in ("torchrun", "deepspeed") or (name in ("accelerate", "accelerate-launch") and script != name):
        words = ["launch"] if name == "accelerate-launch" else []
        argv = [name.removesuffix("-launch"), *words, *arguments]
        return argv if name != "accelerate" or arguments[:1] == ["launch"] else None
    return next(([*words, *arguments] for end, words in LAUNCHER_FILES.items() if script.endswith(f"/{end}")), None)


def prepares(words: list[str]) -> bool:
    """Whether `words` after `python` download something, or prepare data, a tokenizer or a checkpoint."""
    command = read_python(words)
    if command.script is not None:
        return _is_preparation(os.path.basename(command.script)) or _is_megatron_tool(command.script)
    if command.module is not None:
        parts = command.module.split(".")
        named = any(_is_preparation(part) for part in parts) or command.arguments[:1] in (["convert"], ["download"])
        return named or parts[0] in SERVICE_MODULES
    return any(call in word for call in DOWNLOAD_CALLS for word in words)


def _is_preparation(name: str) -> bool:
    parts = _parts(name)
    return (bool(parts & PREPARES) or {"train", "tokenizer"} <= parts) and not parts & COMPUTES


def _is_megatron_tool(script: str) -> bool:
    """Whether a script is in the folder tools/ of a Megatron checkout, or of one that is not here."""
    places = os.path.normpath(script).split(os.sep)
    if "tools" not in places[:-1]:
        return False
    root = os.sep.join(places[: places.index("tools")]) or ("/" if script.startswith("/") else ".")
    return not os.path.exists(script) or os.path.isdir(os.path.join(root, "megatron"))


def is_tool(words: list[str]) -> bool:
    """Whether a launcher with `words` starts a script that does something else than a training, such as converting a checkpoint."""
    for position, word in enumerate(words):
        if word.endswith(".py"):
            name = os.path.basename(word)
            return bool(_parts(name) & OTHER) and not trains(name, words[position + 1 :])
    return False


def _parts(name: str) -> set[str]:
    return set(name.removesuffix(".py").lower().replace("-", "_").replace(".", "_").split("_"))


def trains(name: str, arguments: list[str]) -> bool:
    """Whether a script of this name with these arguments is taken for a training, or for a launch of Megatron's inference."""
    if name.removesuffix(".py") in GENERATES | OF_RECIPES:
        return True
    parts = _parts(name)
    if not parts & OTHER and any(part.startswith(CERTAIN) for part in parts):
        return True
    if any(word.lstrip("+").startswith(VERL_SETTINGS) for word in arguments):
        return True
    given = {word.partition("=")[0] for word in arguments}
    if "_".join(name.split("_")[:2]).removesuffix(".py") in CONFIGURED and not given.isdisjoint(CONFIG_OPTIONS):
        return True
    options = {word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}
    return len(options & MODEL_OPTIONS) >= 2 and len(options & TRAINING_OPTIONS) >= 2
