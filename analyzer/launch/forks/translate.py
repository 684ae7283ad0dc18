"""Reads options and values of forks as options of Megatron-LM.

Only launches with an option that Megatron-LM lacks, or with a value that only a fork accepts, need this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.errors import UnsupportedError
from analyzer.launch.forks import experts, plugins, sizes, swift, vocabulary
from analyzer.launch.forks.fork_table import ForkOption, ForkTable, ForkValue, load_fork_options, megatron_flag, other_spelling
from analyzer.launch.forks.guess import rank_forks
from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading
from analyzer.launch.forks.readings import READINGS
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.option_table import Option
from analyzer.launch.spelling import is_misspelling

_UNKNOWN_AS: Final = {"--optimizer": "adam", "--lr-decay-style": "linear", "--lr-wsd-decay-style": "exponential"}
"""By flag: the value that an unknown one of a fork is counted as."""
_WITHOUT_BIASES: Final = Reading(words=("--disable-bias-linear",), notes=("Megatron-LLM has no biases without --use_bias.",))


@dataclass(frozen=True, slots=True)
class Translation:
    """What the options of a fork mean for Megatron-LM."""

    words: tuple[str, ...] = ()
    """Words to append to Megatron's part of the command line."""
    of_experts: tuple[str, ...] = ()
    """Further words for a model with experts."""
    warnings: tuple[str, ...] = ()
    """One sentence for each option that is not counted, which it names."""
    notes: tuple[str, ...] = ()
    """One sentence for each option that is read as others."""
    dropped: tuple[str, ...] = ()
    """Megatron flags of the launch that the words replace."""
    withheld: tuple[str, ...] = ()
    """Why there can be no verdict (`Arguments.withheld`)."""


def translate(given: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]], *, world: int | None = None) -> Translation:
    """The options `given` that Megatron-LM lacks, and the values in `others` that only forks accept, in Megatron's terms.

    Both are by flag, with the values as written; `others` are options of Megatron-LM. `world`: number of GPUs, if it is known.
    Raises UnsupportedError for an option that selects a model other than a GPT.
    """
    table, known = load_fork_options(), load_catalogue().newest
    dashed = {flag: _dashed(flag, values, known) for flag, values in given.items() if flag not in table.options and "_" in flag}
    folded = {words[0]: words[1:] for words in dashed.values() if words}
    keys = rank_forks(given, table)
    launch = LaunchOptions(given, {**others, **folded}, world, frozenset(keys[:1]))
    defaults = _defaults(launch, keys)
    kept = {flag: words for flag, words in dashed.items() if words and words[0] not in defaults.dropped}
    readings = [_spelled(flag, given[flag], words, table) for flag, words in kept.items()]
    readings += [_value(flag, values, launch, table) for flag, values in launch.megatron.items()]
    readings += [_about_underscores(dashed), defaults]
    for flag in (*given, *(flag for flag in others if flag in table.options)):
        option = None if flag in dashed and megatron_flag(flag, known) else table.find(flag, known)
        if option is not None:
            readings.append(_read(option, launch))
    return _joined(readings)


def has_fork_value(others: Mapping[str, Sequence[str]]) -> bool:
    """Whether an option of Megatron-LM has a value that only forks accept."""
    table = load_fork_options()
    return any(table.find_value(flag, value) is not None for flag, values in others.items() for value in values[:1])


def world_of(given: Mapping[str, Sequence[str]]) -> int | None:
    """Number of GPUs that train, if the fork options give it: slime's nodes and GPUs of the actor."""
    launch = LaunchOptions(given, {})
    if not launch.has("--actor-num-nodes") and not launch.has("--actor-num-gpus-per-node"):
        return None
    return launch.integer("--actor-num-nodes", 1) * launch.integer("--actor-num-gpus-per-node", 8)


def _read(option: ForkOption, launch: LaunchOptions) -> Reading:
    """The reading of one option, with a note for the words that have none. Raises UnsupportedError for another kind of model."""
    flag = option.flag
    if option.effect == "none":
        return NOTHING
    if option.effect == "refused":
        raise UnsupportedError(flag, option.note, "give the options of a GPT")
    if option.effect == "withheld":
        return Reading(withheld=(f"{flag} {option.note}",)) if _switched_on(launch, option) else NOTHING
    if option.effect == "not counted":
        return Reading(warnings=(f"{flag}: {option.note}.",)) if _switched_on(launch, option) else NOTHING
    function = READINGS.get(flag) or READINGS.get(other_spelling(flag))
    if function is not None:
        reading = function(launch, flag)
        if reading.notes or not reading.words:
            return reading
        note = _note(flag, launch.fork.get(flag, launch.megatron.get(flag, ())), reading.words)
        return Reading(words=reading.words, notes=(note,), warnings=reading.warnings, dropped=reading.dropped)
    values = launch.fork[flag]
    if "{0}" in option.words and not values:
        return NOTHING
    words = tuple(word.format(*values) for word in option.words.split())
    return Reading(words=words, notes=(_note(flag, values, words),))


def _switched_on(launch: LaunchOptions, option: ForkOption) -> bool:
    """Whether the option has a value other than false, 0 or none."""
    values = launch.fork.get(option.flag, ())
    return not values or values[0].lower() not in ("false", "0", "none", "no", "disable")


def _value(flag: str, values: Sequence[str], launch: LaunchOptions, table: ForkTable) -> Reading:
    """The reading of a value of one of Megatron's options; nothing if Megatron accepts it."""
    row = table.find_value(flag, values[0]) if values else None
    if row is None:
        return _other_value(flag, values, launch)
    words = (flag, row.replacement) if row.replacement else ()
    if row.effect == "not counted":
        return Reading(words=words, warnings=(f"{flag} {_shown(row, values[0])}: {row.note}.",), dropped=(flag,))
    if flag == plugins.SPEC and plugins.plugin_layers(launch) is not None:  # `with_plugin` says what is not counted
        return Reading(dropped=(flag,))
    if row.effect == "withheld":
        return Reading(words=words, withheld=(f"{flag} {_shown(row, values[0])} {row.note}",), dropped=(flag,))
    if row.effect == "none" or not words or (flag == "--tokenizer-type" and launch.has("--pad-vocab-size-to")):
        return Reading(words=words, dropped=(flag,))
    return Reading(words=words, notes=(_note(flag, values[:1], words),), dropped=(flag,))


def _other_value(flag: str, values: Sequence[str], launch: LaunchOptions) -> Reading:
    """The reading of an optimizer or a schedule that neither Megatron-LM nor a known fork has, in a launch of a fork."""
    option = load_catalogue().newest.get(flag)
    default = _UNKNOWN_AS.get(flag)
    if default is None or option is None or not launch.fork or not values or values[0] in (option.choices or values):
        return NOTHING
    if any(is_misspelling(values[0], str(choice)) for choice in option.choices or ()):
        return NOTHING
    if flag != "--optimizer":
        return Reading(words=(flag, default), dropped=(flag,))
    fault = "this optimizer is not known and counted as Adam, so the prediction may be too high or too low"
    return Reading(words=(flag, default), dropped=(flag,), warnings=(f"{flag} {values[0]}: {fault}.",))


def _shown(row: ForkValue, value: str) -> str:
    return value if not row.value.endswith("*") else row.value.rstrip("*")


def _defaults(launch: LaunchOptions, keys: Sequence[str]) -> Reading:
    """Defaults of the fork that differ from those of Megatron-LM."""
    fork = keys[0] if keys else None
    if fork in ("microsoft", "habana", "bigscience"):
        return experts.deepspeed_defaults(launch)
    if fork == "epfllm":
        return _together(vocabulary.llm_tokenizer(launch), NOTHING if launch.has("--use_bias") else _WITHOUT_BIASES)
    if fork == "mindspeed":
        algorithm = "--context-parallel-algo"
        cp = NOTHING if launch.has(algorithm) else sizes.context_parallel_algorithm(launch, algorithm)
        return _together(cp, sizes.npu_layers(launch))
    if fork == "yuan":
        unknown = launch.word("--tokenizer-type") == "YuanTokenizer" and not launch.has("--vocab-size")
        rows = Reading(words=("--vocab-size", str(vocabulary.YUAN))) if unknown else NOTHING
        return _together(rows, sizes.wide_ffn(launch))
    if fork in ("flagscale", "pai"):
        return sizes.recompute_default(launch)
    if fork == "slime":
        return sizes.slime_defaults(launch)
    if fork == swift.KEY:
        return swift.defaults(launch)
    return NOTHING


def _together(first: Reading, second: Reading) -> Reading:
    """Two readings as one."""
    return Reading(
        words=(*first.words, *second.words),
        of_experts=(*first.of_experts, *second.of_experts),
        notes=(*first.notes, *second.notes),
        warnings=(*first.warnings, *second.warnings),
        dropped=(*first.dropped, *second.dropped),
        withheld=(*first.withheld, *second.withheld),
    )


def _dashed(flag: str, values: Sequence[str], known: Mapping[str, Option]) -> tuple[str, ...]:
    """Megatron's words for an option that is spelled with underscores; none if it turns off what is off by default."""
    name = megatron_flag(flag, known)
    if name is None:
        return ()
    option = known[name]
    if option.kind == "store":
        return (name, *values)
    wanted = not values or values[0].lower() in swift.TRUE
    if name == flag.replace("_", "-"):
        return (name,) if wanted else ()
    return (name,) if wanted == (option.kind != "false") else ()


def _spelled(flag: str, values: Sequence[str], words: tuple[str, ...], table: ForkTable) -> Reading:
    """An option that is spelled with underscores. A value that only a fork accepts is left to `_value`."""
    if len(words) > 1 and table.find_value(words[0], words[1]) is not None:
        return NOTHING
    notes = () if words[0] == flag.replace("_", "-") else (_note(flag, values, words),)
    return Reading(words=words, notes=notes)


def _about_underscores(dashed: Mapping[str, tuple[str, ...]]) -> Reading:
    """One note for all options that differ from Megatron's in underscores only."""
    flags = [flag for flag, words in dashed.items() if words and words[0] == flag.replace("_", "-")]
    if not flags:
        return NOTHING
    if len(flags) == 1:
        return Reading(notes=(f"{flags[0]} is read as {dashed[flags[0]][0]}.",))
    return Reading(notes=(f"{len(flags)} options with underscores, such as {flags[0]}, are read as Megatron's with dashes.",))


def _note(flag: str, values: Sequence[str], words: Sequence[str]) -> str:
    """'--topk 2 is read as --moe-router-topk 2.'"""
    return f"{' '.join((flag, *values))} is read as {' '.join(words)}."


def _joined(parts: Sequence[Reading]) -> Translation:
    """The readings in order; of equal options the last one wins, as on a command line."""
    return Translation(
        words=tuple(word for part in parts for word in part.words),
        of_experts=tuple(word for part in parts for word in part.of_experts),
        warnings=tuple(dict.fromkeys(sentence for part in parts for sentence in part.warnings)),
        notes=tuple(dict.fromkeys(sentence for part in parts for sentence in part.notes)),
        dropped=tuple(dict.fromkeys(flag for part in parts for flag in part.dropped)),
        withheld=tuple(dict.fromkeys(reason for part in parts for reason in part.withheld)),
    )
