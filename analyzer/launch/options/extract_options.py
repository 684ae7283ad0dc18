"""Lists the options of a Megatron-LM checkout: `extract_options.py CHECKOUT OUTPUT.json with-torch|without-torch`.

Runs in a separate process and needs only the standard library. It imports the checkout's `arguments.py` and the configuration
classes that options are made from, but no training code. Missing packages, and with `without-torch` PyTorch, are replaced by
stand-ins. The output is a list of argparse actions, one object each.
"""

from __future__ import annotations

import argparse
import builtins
import enum
import importlib
import importlib.machinery
import importlib.util
import json
import sys
import types
from abc import ABCMeta
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

GPU_PACKAGES = frozenset(
    {"transformer_engine", "transformer_engine_torch", "apex", "flash_attn", "flash_attn_3", "triton", "amp_C", "deepspeed"}
)
"""Not imported: they are slow, and fail on machines without a GPU. Megatron does without them, or gets a stand-in."""

SCRIPTS = frozenset({"tools"})
"""Folders of a checkout with scripts, whose modules are replaced by stand-ins."""

PARSER_MODULES = frozenset({"arguments", "argument_utils", "enums", "logging"})
"""Modules outside megatron.core that are imported: they define options or their choices."""

PARSERS = ("megatron.training.arguments", "megatron.arguments")
"""Modules with the parser: since core 0.6, and before."""

MAX_MISSING_PACKAGES = 60


class StandInType(ABCMeta):
    """The type of stand-ins: classes that replace any object that a module of Megatron uses during its import.

    A stand-in supports attribute access, calls, use as a decorator, subscripts, comparison and inheritance.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> StandInType:
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = stand_in(name)
        setattr(cls, name, child)
        return child

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "stands_in" not in cls.__dict__:
            return super().__call__(*args, **kwargs)
        if args and isinstance(args[0], argparse.ArgumentParser):
            return args[0]
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return cls

    def __getitem__(cls, _item: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        return "stands_in" not in cls.__dict__

    def __contains__(cls, _item: Any) -> bool:
        return False

    def __int__(cls) -> int:
        return 0

    __index__ = __int__

    def __float__(cls) -> float:
        return 0.0

    def _compared(cls, _other: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _compared

    def _computed(cls, *_others: Any) -> Any:
        return cls

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __neg__ = _computed
    __enter__ = __exit__ = _computed


def stand_in(name: str) -> Any:
    """A stand-in class for `name`."""

    def ignore(_self: Any, *_args: Any, **_kwargs: Any) -> None:
        """Replaces `__init__`."""

    def read(_self: Any, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return stand_in(attribute)

    return StandInType(name, (), {"stands_in": True, "__init__": ignore, "__getattr__": read})


class StandInModule(ModuleType):
    """A module whose every attribute is a stand-in, or a submodule of the folder that it has in the checkout."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        super().__init__(name)
        self.__path__ = [] if folder is None else [str(folder)]
        self.__version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if any((Path(folder) / name).is_dir() or (Path(folder) / f"{name}.py").is_file() for folder in self.__path__):
            return importlib.import_module(f"{self.__name__}.{name}")
        child = stand_in(name)
        setattr(self, name, child)
        return child


class Finder:
    """Import hook: Megatron's modules get the real module, a stand-in, or ModuleNotFoundError."""

    def __init__(self, checkout: Path, missing: set[str]) -> None:
        self.checkout = checkout
        self.missing = missing
        """Packages that are replaced by stand-ins, and modules of Megatron that did not have a name that was imported."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top in self.missing or name in self.missing or top in SCRIPTS or _is_training_code(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if top in GPU_PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        folder = self.checkout.joinpath(*spec.name.split("."))
        module = StandInModule(spec.name, folder if spec.name.startswith("megatron") and folder.is_dir() else None)
        if spec.name == "deepspeed":
            module.add_config_arguments = add_deepspeed_options  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has no code to execute."""


def _is_training_code(name: str) -> bool:
    """Whether `name` is a module of Megatron outside megatron.core that defines no options."""
    package, _, rest = name.partition(".")
    if package != "megatron" or not rest or rest == "core" or rest.startswith("core."):
        return False
    return rest.rpartition(".")[2] not in PARSER_MODULES and "config" not in rest


def add_deepspeed_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options that `deepspeed.add_config_arguments` adds (deepspeed/__init__.py, `_add_core_arguments`)."""
    for name in ("--deepspeed", "--deepscale"):
        parser.add_argument(name, action="store_true")
        parser.add_argument(f"{name}_config", type=str)
    return parser


def combine_metaclasses() -> None:
    """Lets classes inherit from a stand-in and from a class with another metaclass, such as a protocol."""
    build_class = builtins.__build_class__

    def build(function: Any, name: str, *bases: Any, **keywords: Any) -> Any:
        try:
            return build_class(function, name, *bases, **keywords)
        except TypeError as error:
            if "metaclass conflict" not in str(error):
                raise
        metaclasses = {type(base) for base in types.resolve_bases(bases)} | {keywords.pop("metaclass", type)}
        derived = [each for each in metaclasses if not any(each is not other and issubclass(other, each) for other in metaclasses)]
        keywords["metaclass"] = type("CombinedType", tuple(sorted(derived, key=lambda each: each is StandInType)), {})
        return build_class(function, name, *bases, **keywords)

    builtins.__build_class__ = build  # type: ignore[assignment]


class Captured(Exception):
    """Passes the parser out of Megatron's `parse_args`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def build_parser(checkout: Path, missing: set[str]) -> argparse.ArgumentParser:
    """The parser that the checkout's `parse_args` builds, with the packages in `missing` replaced.

    If an import fails, the package, or the module of Megatron, is added to `missing` and the import is repeated. Raises ImportError
    if a module of megatron.core lacks an imported name, RuntimeError if too many imports fail.
    """
    sys.path.insert(0, str(checkout))
    sys.meta_path.insert(0, Finder(checkout, missing))
    combine_metaclasses()
    for _ in range(MAX_MISSING_PACKAGES):
        try:
            return _captured_parser(checkout)
        except ImportError as error:
            name = error.name or ""
            package = name.partition(".")[0]
            replaced = name if package == "megatron" else package
            found_in_core = name.startswith("megatron.core") and not isinstance(error, ModuleNotFoundError)
            if replaced in ("", "megatron", *PARSERS) or replaced in missing or found_in_core:
                raise
            missing.add(replaced)
            for loaded in [name for name in sys.modules if name.partition(".")[0] in ("megatron", package)]:
                del sys.modules[loaded]
    raise RuntimeError("too many packages are missing")


def _captured_parser(checkout: Path) -> argparse.ArgumentParser:
    def capture(parser: argparse.ArgumentParser, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise Captured(parser)

    root = checkout / "megatron"
    sys.modules["megatron"] = StandInModule("megatron", root)  # without running its __init__.py
    name = next(each for each in PARSERS if checkout.joinpath(*each.split(".")).with_suffix(".py").is_file())
    arguments = importlib.import_module(name)
    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = capture  # type: ignore[method-assign, assignment]
    try:
        arguments.parse_args()
    except Captured as captured:
        return captured.parser
    raise RuntimeError("parse_args made no parser")


def plain(value: Any) -> Any:
    """`value` for JSON: enums by name, and null for types that JSON does not have."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, int) else value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None


def describe(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The options of `parser`, in the order in which they were added."""
    kinds = {"_StoreAction": "store", "_StoreTrueAction": "true", "_StoreFalseAction": "false", "BooleanOptionalAction": "boolean"}
    return [
        {
            "flags": list(action.option_strings),
            "dest": action.dest,
            "kind": kinds.get(type(action).__name__, "store"),
            "nargs": action.nargs,
            "const": plain(action.const),
            "default": plain(action.default),
            "type": getattr(action.type, "__name__", None),
            "choices": plain(list(action.choices)) or None if action.choices is not None else None,
        }
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    ]


def main(words: Sequence[str]) -> None:
    checkout, output, torch = Path(words[0]), Path(words[1]), words[2]
    parser = build_parser(checkout, {"torch"} if torch == "without-torch" else set())
    output.write_text(json.dumps(describe(parser)))


if __name__ == "__main__":
    main(sys.argv[1:])
