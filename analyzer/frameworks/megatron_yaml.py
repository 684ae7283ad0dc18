"""A file of Megatron-LM's own `--yaml-cfg`, given without the option."""

from __future__ import annotations

from analyzer.errors import InputError
from analyzer.frameworks.prepare import Input, Output


def read(launch: Input) -> Output:
    """The option with the file. Raises InputError for overrides, which Megatron-LM does not have."""
    if launch.found.words:
        raise InputError(launch.found.words[0], "is no option beside a file of --yaml-cfg", "change the file")
    return Output(argv=("--yaml-cfg", launch.found.program))
