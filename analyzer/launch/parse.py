"""Parses a command line into Megatron's arguments, the processes of the launch, and the --info options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments
from analyzer.launch.argv_parser import Reading, is_option, operands_of, read_words
from analyzer.launch.entry_script import check_entry
from analyzer.launch.info_files import check_model_file
from analyzer.launch.info_options import (
    IMAGE_TOKENS,
    LORA,
    LORA_REGATHER,
    MODEL,
    NO_IMAGES,
    PREFIX,
    InfoOptions,
    read_info_options,
    takes_value,
)
from analyzer.launch.launchers.read_world import read_world
from analyzer.launch.launchers.world import World
from analyzer.launch.megatron_words import MegatronWords, megatron_words, with_fork_values
from analyzer.launch.options.catalogue import PREFERRED, load_catalogue
from analyzer.launch.options.choose_release import LaterRelease, chosen_table, read_with_catalogue
from analyzer.launch.options.script_options import script_of, table_with_script, with_script
from analyzer.launch.software import software_of
from analyzer.launch.split_argv import SplitArgv, split_argv
from analyzer.launch.what_if import changed_words
from analyzer.specs.adapters import ADAPTER_TARGETS
from analyzer.specs.fine_tuning import Adapter, FineTuning
from analyzer.specs.vision_part import NO_PARTS, ModelParts

YAML = "--yaml-cfg"

if TYPE_CHECKING:
    from analyzer.launch.options.catalogue import Catalogue
    from analyzer.launch.options.choose_release import Choice
    from analyzer.launch.options.option_table import Option, OptionTable


def parse(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: Path,
    own: MegatronWords | None = None,
    later: LaterRelease | None = None,
) -> tuple[Arguments, World | None, InfoOptions]:
    """Parses `argv`, the words after the program's name.

    `environ` is the environment and `folder` the working folder of the launch. `own`: Megatron's options of a launch through a
    framework; `argv` then has only options of the launcher and of this program. `later`: the release to assume for the launch of a
    framework that another one refuses. Raises InputError for what torchrun or Megatron refuses, UnsupportedError for what is not
    modelled. The world is None if nothing gives the number of GPUs.
    """
    command = _read_command(argv, environ, folder)
    words, info, known = command.words, command.info, command.known
    world = read_world(
        words.launcher_options,
        environ,
        launcher=words.launcher,
        folder=folder,
        size=info.world_size,
        gpus_per_node=info.gpus_per_node,
    )
    size = None if world is None else world.size
    of_framework = own is not None
    if own is None:
        of_megatron = changed_words(words.megatron, info, known)
        own = megatron_words(of_megatron, words.entry, command.choice.table, command.catalogue, world=size, strict=info.strict)
    else:
        own = replace(own, words=changed_words(own.words, info, known))
        if info.strict:
            _refuse_unknown(own)
    later = later or own.release
    if later is not None and (of_framework or own.complete):
        command = replace(command, choice=later.choice(command.choice, command.catalogue))
    entry = _about_entry(words, known) if own.model is None and not of_framework else ()
    if info.world_size is None:
        world = own.world or world
    model = info.model or own.model
    if model is not None:
        check_model_file(info, model, folder)
    script = of_framework or own.complete or (words.entry is not None and own.model is None)
    sources = _Sources(command.choice, command.catalogue, model, script=script, folder=folder)
    own, parsed = _read_values_of_forks(own, sources, known)
    arguments = _arguments(command, own, parsed, about_entry=entry)
    if arguments.get("use_checkpoint_args"):
        from analyzer.launch.options.checkpoint_args import with_checkpoint_args

        arguments = with_checkpoint_args(arguments, folder)
    return arguments, world, info


@dataclass(frozen=True)
class _Command:
    """The words of a command line, and the options by which Megatron's words are told from others."""

    words: SplitArgv
    info: InfoOptions
    catalogue: Catalogue
    choice: Choice
    known: Mapping[str, Option]
    statements: tuple[str, ...]
    """About the file of --yaml-cfg."""


def _read_command(argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> _Command:
    """Separates the words of the launcher, of Megatron and of this program, with the options of the training script."""
    catalogue = load_catalogue()
    argv, of_file = _with_yaml(argv, catalogue, environ, folder)
    words = split_argv(argv, catalogue.newest)
    if script_of(words.entry) is not None:
        catalogue = with_script(catalogue, words.entry)
        words = split_argv(argv, catalogue.newest)
    info = read_info_options(words.info)
    choice = chosen_table(info.megatron, catalogue, environ, folder, entry=words.entry)
    table = table_with_script(choice.table, words.entry)
    known: Mapping[str, Option] = catalogue.newest
    if table is not None:
        known = {**catalogue.newest, **table.options}
        words = split_argv(argv, known)
    return _Command(words, info, catalogue, replace(choice, table=table), known, tuple(of_file))


def _arguments(command: _Command, own: MegatronWords, parsed: _Parsed, *, about_entry: tuple[str, ...]) -> Arguments:
    """Megatron's arguments, with what the report says about the words."""
    info, choice = command.info, command.choice
    software, versions = software_of(parsed.table.release, te=info.te, torch=info.torch, engine=info.engine)
    return Arguments(
        values=MappingProxyType({**parsed.table.defaults, **parsed.reading.values}),
        given=frozenset(parsed.reading.values),
        spelled=MappingProxyType(parsed.reading.spelled),
        release=parsed.table.release,
        source=parsed.table.source,
        entry=command.words.entry,
        assumptions=(*choice.assumptions, *parsed.notes, *own.notes),
        warnings=(
            *((f"{choice.failure} The {parsed.table.source} is used instead.",) if choice.failure else ()),
            *parsed.warnings,
            *parsed.reading.notes,
        ),
        unknown=(*about_entry, *parsed.statements, *own.statements, *command.statements),
        withheld=own.withheld,
        tuning=_tuning(own.tuning, info),
        validated=own.validated,
        parts=parsed.parts.joined(own.parts),
        words=parsed.words,
        fork=own.fork.fork.key if own.fork is not None else None,
        software=software,
        versions=versions,
    )


def _refuse_unknown(own: MegatronWords) -> None:
    """Raises InputError for keys of a framework that are not known."""
    if own.unknown:
        fault = "is not known" if len(own.unknown) == 1 else "are not known"
        raise InputError(
            ", ".join(own.unknown), fault, "leave out --info-strict to analyze the launch without the memory of these keys"
        )


def _tuning(tuning: FineTuning, info: InfoOptions) -> FineTuning:
    """What the launch trains, with the adapters of --info-lora and the samples of --info-sample-length."""
    if info.sample_length is not None:
        tuning = replace(tuning, sample_length=info.sample_length)
    if info.image_tokens is not None:
        if tuning.vision is None:
            raise InputError(IMAGE_TOKENS, NO_IMAGES, "remove it")
        tuning = replace(tuning, vision=replace(tuning.vision, image_tokens=info.image_tokens))
    if info.lora is None:
        if info.lora_regather:
            raise InputError(LORA_REGATHER, f"is only used with {LORA}", f"add {LORA} 32, or leave it out")
        return tuning
    if tuning.adapter is not None:
        raise InputError(LORA, f"the launch has adapters already ({tuning.adapter.source})", "leave one of them out")
    rank, targets = info.lora
    unknown = sorted({*targets} - {*ADAPTER_TARGETS})
    if unknown:
        raise InputError(LORA, f"{unknown[0]!r} is no linear layer that can have an adapter", f"use {', '.join(ADAPTER_TARGETS)}")
    adapter = Adapter(kind="lora", rank=rank, targets=targets, regathers=info.lora_regather, source=f"{LORA} {rank}")
    return replace(tuning, adapter=adapter)


def _with_yaml(
    argv: Sequence[str], catalogue: Catalogue, environ: Mapping[str, str], folder: Path
) -> tuple[Sequence[str], list[str]]:
    """`argv` with the options of the file of --yaml-cfg in the place of Megatron's, which Megatron then ignores, and statements."""
    if not any(word.partition("=")[0] == YAML for word in argv):
        return argv, []
    from analyzer.launch.yaml_config import words_of_yaml

    words = split_argv(argv, catalogue.newest)
    position = next(index for index, word in enumerate(words.megatron) if word.partition("=")[0] == YAML)
    attached = words.megatron[position].partition("=")[2]
    name = attached or next(iter(words.megatron[position + 1 : position + 2]), "")
    if not name:
        raise InputError(YAML, "has no value", f"write {YAML} FILE")
    options, statements = words_of_yaml(name, catalogue.newest, environ=environ, folder=folder)
    ignored = [word.partition("=")[0] for word in words.megatron if is_option(word) and word.partition("=")[0] != YAML]
    if ignored:
        statements.append(f"{', '.join(dict.fromkeys(ignored))}: Megatron-LM ignores options beside {YAML}.")
    rest = list(argv)
    for word in words.megatron:
        rest.remove(word)
    return [*rest, *options], statements


@dataclass(frozen=True)
class _Sources:
    """Where options and model of a launch come from."""

    choice: Choice
    catalogue: Catalogue
    model: str | None
    script: bool
    folder: Path


@dataclass(frozen=True)
class _Parsed:
    """Megatron's words, the table that they were read with, and assumptions about both."""

    table: OptionTable
    reading: Reading
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    """About options of the launch that replace those of the model."""
    parts: ModelParts = NO_PARTS
    """What its options do not say of the model that --info-model names."""


def _read_values_of_forks(own: MegatronWords, sources: _Sources, known: Mapping[str, Option]) -> tuple[MegatronWords, _Parsed]:
    """Parses the words; if Megatron refuses them, with the values that only forks accept translated."""
    try:
        return own, _read(own, sources)
    except InputError:
        accepted = with_fork_values(own.words, known)
        if accepted is None:
            raise
    notes, statements = (*own.notes, *accepted.notes), (*own.statements, *accepted.statements)
    own = replace(own, words=accepted.words, notes=notes, statements=statements)
    return own, _read(own, sources)


def _read(own: MegatronWords, sources: _Sources) -> _Parsed:
    """Parses the words, preceded by those of the model that --info-model names."""
    table = sources.choice.table
    release = table.release if table is not None else PREFERRED
    words, described, replaced, parts = _with_model(own, table, sources, release=release)
    if table is not None:
        return _Parsed(table, read_words(words, table), words, described, statements=replaced, parts=parts)
    chosen, reading, note = read_with_catalogue(words, sources.catalogue, choice=sources.choice, fork=own.fork)
    if sources.model is not None and chosen.release != PREFERRED:
        words, *_ = _with_model(own, chosen, sources, release=chosen.release)
        reading = read_words(words, chosen)
    if own.fork is not None and chosen.release != PREFERRED:  # one option of a fork may have changed the release
        return _Parsed(chosen, reading, words, described, warnings=(note,), statements=replaced, parts=parts)
    return _Parsed(chosen, reading, words, (*described, note), statements=replaced, parts=parts)


def _with_model(
    own: MegatronWords, table: OptionTable | None, sources: _Sources, *, release: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], ModelParts]:
    """Megatron's words, preceded by those of the model that --info-model names; assumptions about it; what the launch replaces;
    what its options do not say.

    Raises InputError if the model needs an option that `table` does not have.
    """
    words = own.words
    if sources.model is None:
        return words, (), (), NO_PARTS
    from analyzer.launch.model_config.launch_words import with_model  # imported for such launches only, for a short start-up

    found = with_model(
        sources.model, words, of_experts=own.of_experts, script=sources.script, release=release, folder=sources.folder
    )
    added = found.words[: len(found.words) - len(words)]
    missing = [word for word in added if table is not None and is_option(word) and word not in table.options]
    if missing:
        fault = f"the model needs {missing[0]}, which Megatron-LM {release} does not have"
        raise InputError(MODEL, fault, "use a later release, such as --info-megatron " + PREFERRED)
    return found.words, found.notes, found.warnings, found.parts


def _about_entry(words: SplitArgv, known: Mapping[str, Option]) -> tuple[str, ...]:
    """The statement about the training script, if there is one. Raises UnsupportedError for a script of another model."""
    if words.entry is None:
        return ()
    options: dict[str, list[str]] = {}
    for position, word in enumerate(words.megatron):
        flag, equals, attached = word.partition("=")
        if is_option(word):
            following = (
                operands_of(known[flag], words.megatron[position + 1 :]) if flag in known else words.megatron[position + 1 :][:1]
            )
            options[flag] = [attached] if equals else list(following)
    stated = check_entry(words.entry, module=any(dest == "module" for dest, _, _ in words.launcher_options), options=options)
    return () if stated is None else (stated,)


def words_of_launch(argv: Sequence[str], *, recorded: Sequence[str]) -> list[str]:
    """`argv`, preceded by the words of a recorded launch if `argv` has only --info options.

    `recorded` starts with the program's name.
    """
    words = split_argv(argv, load_catalogue().newest)
    if words.megatron or words.launcher_options or words.entry is not None or any(name == MODEL for name, _ in words.info):
        return list(argv)
    return [*_without_info_options(recorded[1:]), *argv]


def _without_info_options(argv: Sequence[str]) -> list[str]:
    """The words without the --info options and their values, except for the one that gives the model."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if not flag.startswith(PREFIX):
            kept.append(word)
        elif flag == MODEL:
            kept += [word] if equals else [word, *islice(words, 1)]
        elif takes_value(flag) and not equals:
            next(words, None)
    return kept
