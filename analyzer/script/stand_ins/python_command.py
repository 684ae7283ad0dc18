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
    if command.module is not None and trains(command.module.rpartition(".")[2], command.arguments):
        return ["-m", command.module, *command.arguments]
    if command.script is not None and trains(os.path.basename(command.script), command.arguments):
        return [command.script, *command.arguments]
    return None


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
    if name.removesuffix(".py") in GENERATES:
        return True
    parts = _parts(name)
    if not parts & OTHER and any(part.startswith(CERTAIN) for part in parts):
        return True
    if any(word.lstrip("+").startswith(VERL_SETTINGS) for word in arguments):
        return True
    options = {word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}
    return len(options & MODEL_OPTIONS) >= 2 and len(options & TRAINING_OPTIONS) >= 2
