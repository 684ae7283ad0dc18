"""Commands of ms-swift (`megatron sft …`), and YAML files with their arguments: the keys are the options of the command line.

Source: swift/cli/main.py and swift/arguments of ms-swift 4.6, where a file stands for the options that it has. The options
are read by `analyzer.launch.forks.swift`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from analyzer.frameworks.options import text
from analyzer.frameworks.prepare import Input, Output
from analyzer.frameworks.recognize import YAML
from analyzer.frameworks.yaml_files import override, read_tree, resolve


def read(launch: Input) -> Output:
    """The options of the command. Options after a file take precedence over those that it has."""
    name, words = launch.found.program, list(launch.found.words)
    task = () if name.endswith(YAML) or name != "rlhf" or "--rlhf_type" in words else ("--rlhf_type", "dpo")
    if not name.endswith(YAML):
        if not words[0].endswith(YAML):
            return Output(argv=(*words, *task))
        name, words = words[0], words[1:]
    tree = read_tree(launch.folder / name, name)
    rest = override(tree, words)
    tree = resolve(tree, name, environ=launch.environ)
    task = () if "rlhf_type" in tree else task
    return Output(argv=(*_words(tree), *rest, *task))


def _words(tree: dict[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        if value is None:
            continue
        yield f"--{key}"
        if isinstance(value, list):
            yield from (text(each) for each in value)
        elif isinstance(value, bool):
            yield "true" if value else "false"
        else:
            yield text(value)
