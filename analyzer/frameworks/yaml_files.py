"""YAML files of frameworks: reading, merging, overrides, and values that refer to others (`${...}`).

PyYAML and OmegaConf are imported when a file is read, because other launches do not need them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.files import refuse_special_file
from analyzer.launch.written_files import as_written

Tree = dict[str, Any]
_MOST_FILES: Final = 100
"""Files that one launch may include."""
_MOST_VALUES: Final = 200_000
"""Values of a file, with those of aliases counted each time."""
_INSTALL: Final = "pip install 'get-training-info[frameworks]'"
_TOO_DEEP: Final = "has keys in keys that are too deep to read"
_REMEDY: Final = "give a configuration of a framework"


def read_tree(path: Path, name: str | None = None) -> Tree:
    """The keys of a YAML file. Raises InputError for a file that cannot be read, or has no keys."""
    shown = name or str(path)
    yaml = _yaml()
    path = as_written(path)
    refuse_special_file(path, shown, _REMEDY)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(shown, f"cannot be read ({getattr(error, 'strerror', None) or error})", _REMEDY) from None
    try:
        content = yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise InputError(shown, *_about(error)) from None
    except RecursionError:
        raise InputError(shown, _TOO_DEEP, _REMEDY) from None
    if content is None:
        return {}
    _refuse_many(content, shown)
    if not isinstance(content, dict):
        raise InputError(shown, "has no keys", _REMEDY)
    return content


def _about(error: Exception) -> tuple[str, str]:
    """What is wrong with a file that is not YAML, and the remedy."""
    place, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if place is None:
        return f"is not YAML ({str(error).splitlines()[0] if str(error) else type(error).__name__})", "correct that value"
    what = f" ({problem.splitlines()[0]})" if isinstance(problem, str) and problem else ""
    return f"is not YAML in line {place.line + 1}{what}", "correct that line"


def _refuse_many(content: Any, name: str) -> None:
    """Raises InputError for more values than a configuration has, such as those of aliases inside aliases."""
    waiting, count = [content], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > _MOST_VALUES:
            raise InputError(name, f"has more than {_MOST_VALUES} values", _REMEDY)
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def parse_value(text: str) -> Any:
    """The value of an override: a number, true, null, a list, or a text."""
    yaml = _yaml()
    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
        return text


def merge(base: Tree, other: Mapping[str, Any]) -> Tree:
    """`base` with the keys of `other`, which take precedence; nested keys are merged. `base` is changed."""
    for key, value in other.items():
        present = base.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            merge(present, value)
        else:
            base[key] = _copy(value)
    return base


def set_key(tree: Tree, path: str, value: Any) -> None:
    """Sets a key such as policy.megatron_cfg.enabled. Raises InputError if a part of the path has no keys."""
    *parents, last = path.split(".")
    for part in parents:
        below = tree.get(part)
        if below is None:
            below = tree[part] = {}
        if not isinstance(below, dict):
            raise InputError(path, f"{part} has no keys", "correct the override")
        tree = below
    if isinstance(value, dict) and isinstance(tree.get(last), dict):
        merge(tree[last], value)
    else:
        tree[last] = value


def remove_key(tree: Tree, path: str) -> None:
    """Removes a key, if it is there."""
    *parents, last = path.split(".")
    for part in parents:
        tree = tree.get(part, {})
        if not isinstance(tree, dict):
            return
    tree.pop(last, None)


def get(tree: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value of a key such as policy.precision; `default` if it is missing or null."""
    value: Any = tree
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return default
        value = value.get(part)
    return default if value is None else value


def table(tree: Mapping[str, Any], path: str) -> Tree:
    """The keys below `path`; none if it is missing, empty or false. Raises InputError for another value."""
    return keys_of(get(tree, path), path)


def keys_of(value: Any, path: str) -> Tree:
    """`value` if it has keys; none if it is missing, empty, false, or refers to something else. Raises InputError otherwise."""
    if isinstance(value, dict):
        return value
    if not value or (isinstance(value, str) and value.startswith("${")):
        return {}
    raise InputError(path, f"is {value!r}, which has no keys", "write its keys below it, or leave it out")


def override(tree: Tree, words: Iterable[str], file: str | None = None) -> list[str]:
    """Applies the words `key=value`, `+key=value`, `++key=value` and `~key` (Hydra). Returns the words that are none of them.

    `file`: its name, if it has all sections, as in Hydra. Raises InputError for an override without a value, and without + for a
    section that the file lacks, and for a key that is similar to one of the file.
    """
    rest = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"\+{0,2}[A-Za-z_][\w./@-]*", name):
            if not value:
                raise InputError(name.lstrip("+"), "has no value", f"write {name}=VALUE, or {name}=null")
            if file is not None and not name.startswith("+"):
                _refuse_misspelled(tree, name, word, file)
            set_key(tree, name.lstrip("+"), parse_value(value))
        elif re.fullmatch(r"~[A-Za-z_][\w.]*", word):
            remove_key(tree, word[1:])
        else:
            rest.append(word)
    return rest


def _refuse_misspelled(tree: Tree, path: str, word: str, file: str) -> None:
    """Raises InputError for a key that `tree` lacks, if it has a similar one, or nothing below its first part."""
    from analyzer.launch.spelling import is_misspelling

    part: Any = tree
    parts = path.split(".")
    for depth, key in enumerate(parts):
        if not isinstance(part, dict):  # set_key says that it has no keys
            return
        if key not in part:
            similar = next((str(each) for each in part if is_misspelling(key, str(each))), None)
            if similar is None and depth:
                return
            meant = f"write {'.'.join([*parts[:depth], similar, *parts[depth + 1 :]])}, or " if similar else ""
            raise InputError(path, f"is no key of {file}", f"{meant}add it with +{word}")
        part = part[key]


def resolve(tree: Tree, name: str, *, environ: Mapping[str, str]) -> Tree:
    """`tree` with the values that `${...}` refers to. References that cannot be resolved are left as they are.

    `environ` is the environment of the launch (`oc.env`). Raises InputError without OmegaConf if there are references.
    """
    if "${" not in str(tree):
        return tree
    omegaconf = _omegaconf(name)
    try:
        config: Any = omegaconf.OmegaConf.create(tree, flags={"allow_objects": True})
    except RecursionError:
        raise InputError(name, _TOO_DEEP, _REMEDY) from None
    except omegaconf.errors.OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        fault = str(error).splitlines()[0]
        raise InputError(key or name, f"cannot be read ({fault})", f"correct its value in {name}") from None
    _register(omegaconf.OmegaConf, environ)
    try:
        resolved: Tree = _resolved(config, omegaconf)
    except RecursionError:
        raise InputError(name, _TOO_DEEP, _REMEDY) from None
    return resolved


def _resolved(config: Any, omegaconf: Any) -> Any:
    """Plain values of a configuration, key by key, so that one that cannot be resolved does not hide the others."""
    if isinstance(config, omegaconf.DictConfig):
        if config._is_none() or config._is_missing():
            return None
        return {str(key): _item(config, key, omegaconf) for key in config}
    if isinstance(config, omegaconf.ListConfig):
        return None if config._is_none() else [_item(config, index, omegaconf) for index in range(len(config))]
    return config


def _item(config: Any, key: Any, omegaconf: Any) -> Any:
    try:
        return _resolved(config[key], omegaconf)
    except (omegaconf.errors.OmegaConfBaseException, ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        node = config._get_node(key)
        return node._value() if node is not None else None


def _register(config: Any, environ: Mapping[str, str]) -> None:
    """The resolvers that frameworks register: arithmetic of NeMo-RL, and the environment."""
    resolvers = {
        "mul": lambda a, b: a * b,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "div": lambda a, b: a // b,
        "max": lambda a, b: max(a, b),
        "min": lambda a, b: min(a, b),
        "oc.env": lambda variable, *default: environ[variable] if not default else environ.get(variable, *default),
    }
    register = config.register_resolver if _is_renamed(config) else config.register_new_resolver
    for resolver, function in resolvers.items():
        register(resolver, function, replace=True)


def _is_renamed(config: Any) -> bool:
    """Whether OmegaConf has its later name of `register_new_resolver` (2.4); before 2.4 that name is of an older function."""
    from inspect import signature

    found = getattr(config, "register_resolver", None)
    return found is not None and "replace" in signature(found).parameters


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _yaml() -> Any:
    try:
        import yaml  # for such launches only, for a short start-up
    except ImportError:
        raise InputError("YAML", "is read with PyYAML, which is not installed", _INSTALL) from None
    return yaml


def _omegaconf(name: str) -> Any:
    try:
        import omegaconf  # optional
        import omegaconf.errors
    except ImportError:
        fault = "refers to values with ${...}, which are read with OmegaConf, which is not installed"
        raise InputError(name, fault, _INSTALL) from None
    return omegaconf


_LOADERS: list[Any] = []


def _loader() -> Any:
    """The safe loader of PyYAML that also reads 1e-5 as a number, and unknown tags as plain values."""
    if not _LOADERS:
        yaml = _yaml()

        class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
            pass

        number = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?[eE][-+]?\d+|\.\d+(?:[eE][-+]?\d+)?)$")
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
        Loader.add_multi_constructor("", _untagged)
        _LOADERS.append(Loader)
    return _LOADERS[0]


def _untagged(loader: Any, _suffix: str, node: Any) -> Any:
    """The value of a node with a tag of its own, such as !!python/name."""
    if hasattr(node, "value") and isinstance(node.value, str):
        return loader.construct_scalar(node)
    first = node.value[0] if node.value else None
    return loader.construct_mapping(node, deep=True) if isinstance(first, tuple) else loader.construct_sequence(node, deep=True)


class Files:
    """Reads files that include others, and refuses cycles."""

    def __init__(self) -> None:
        self.read: list[Path] = []

    def tree(self, path: Path, name: str | None = None) -> Tree:
        """The keys of a file. Raises InputError for too many files, or for one that cannot be read."""
        self.read.append(path)
        if len(self.read) > _MOST_FILES:
            raise InputError(str(self.read[0]), f"includes more than {_MOST_FILES} files", "remove the cycle of files")
        return read_tree(path, name)


def included(tree: Tree, key: str, name: str) -> list[str]:
    """Removes the names of the files that a file includes, and returns them. Raises InputError for other values."""
    value = tree.pop(key, None)
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InputError(name, f"{key} has {value!r}, which is no name of a file", f"write {key}: FILE.yaml, or a list of files")
    return names


def of_file(each: str, name: str) -> str:
    """How an included file is named in messages."""
    return f"{each} (of {name.partition(' (of ')[0]})"


def normal(path: Path) -> Path:
    """The path without `..`."""
    return Path(os.path.normpath(path))
