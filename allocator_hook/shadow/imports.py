"""Makes packages importable that need CUDA: optional packages, and the compiled extension of Transformer Engine."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Final

STUBBED: Final = ("onnxscript", "onnx", "triton", "nvdlfw_inspect")
"""Packages that Transformer Engine imports at module level but a training step does not need."""

_EXPORT: Final = "transformer_engine.pytorch.te_onnx_extensions"
"""Export to ONNX of Transformer Engine 1, which recent releases of PyTorch do not support."""

_TE_LOADER: Final = "transformer_engine.common"


class Launchable:
    """A Triton kernel or another object of a stubbed package. Items, attributes and calls return such an object again.

    A launch, `kernel[grid](…)`, is passed to `launched` with the name of the kernel and the arguments.
    """

    launched: Callable[[str, Sequence[Any]], None] = staticmethod(lambda name, args: None)

    def __init__(self, name: str, *, has_grid: bool = False) -> None:
        self.__name__ = name
        self._has_grid = has_grid

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_grid:
            self.launched(self.__name__, (*args, *kwargs.values()))
        elif len(args) == 1 and not kwargs and callable(args[0]):
            # a decorator: the decorated function is dropped, because it would run on the GPU
            return args[0] if isinstance(args[0], Launchable) else Launchable(getattr(args[0], "__name__", self.__name__))
        return self

    def __getitem__(self, grid: Any) -> Launchable:
        return Launchable(self.__name__, has_grid=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Launchable(name)


_ON_HOST: Final[dict[str, Callable[..., int]]] = {
    "next_power_of_2": lambda number: 1 << (number - 1).bit_length(),
    "cdiv": lambda dividend, divisor: -(-dividend // divisor),
}
"""Triton functions that callers use on the CPU to compute tensor sizes."""


class _StubClass:
    """Base of the classes of a stubbed package. Objects have their named arguments, and `kwargs`, as `triton.Config` has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.__dict__.update(options)
        self.kwargs = args[0] if args and isinstance(args[0], dict) else {}


class StubModule(ModuleType):
    """A stub of a package. Capitalized attributes are classes, because callers use them with isinstance or as base classes."""

    __path__: list[str] = []  # noqa: RUF012  (the import system reads it from the instance or the class)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ON_HOST:
            return _ON_HOST[name]
        made = type(name, (_StubClass,), {}) if name[:1].isupper() else Launchable(name)
        setattr(self, name, made)
        return made


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of the stubbed packages, before the regular finders run."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        if fullname.split(".")[0] in STUBBED or fullname == _EXPORT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """A stub has no code."""


class _LibraryFolder:
    """The folder in which Transformer Engine up to 2.3 looks for its shared library. It finds that for PyTorch."""

    LIBRARY: Final = "transformer_engine_torch, which is imported already"

    def __truediv__(self, name: str) -> _LibraryFolder:
        return self

    def glob(self, pattern: str) -> Iterator[str]:
        return iter((self.LIBRARY,) if pattern.startswith("transformer_engine_torch") else ())


class _Imported(importlib.abc.Loader):
    """Loads a module that is in `sys.modules`."""

    def create_module(self, spec: Any) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """The module is complete."""


def _spec_of_file(real: Callable[..., Any]) -> Callable[..., Any]:
    def spec(name: str, location: Any = None, **options: Any) -> Any:
        if location == _LibraryFolder.LIBRARY:
            return importlib.machinery.ModuleSpec(name, _Imported())
        return real(name, location, **options)

    return spec


class _AfterLoading(importlib.abc.Loader):
    """Runs the real loader, then replaces the functions that would find and load the shared library."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
        module.get_te_path = _LibraryFolder  # type: ignore[attr-defined]


class _TransformerEngineFinder(importlib.abc.MetaPathFinder):
    """Finds `transformer_engine.common` and replaces its `load_framework_extension` before it is called."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if fullname != _TE_LOADER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader)
        return spec


class Imports:
    """Context manager that makes `modules` importable by name, and stubs the packages that need CUDA."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = dict(modules)
        self._finders = (_StubFinder(), _TransformerEngineFinder())
        self._before: dict[str, ModuleType | None] = {}
        self._environ: str | None = None
        self._spec_of_file: Callable[..., Any] = importlib.util.spec_from_file_location

    def __enter__(self) -> Imports:
        # with this variable Transformer Engine does not load libcudnn, nvrtc and its own libraries
        self._environ = os.environ.get("NVTE_PROJECT_BUILDING")
        os.environ["NVTE_PROJECT_BUILDING"] = "1"
        sys.meta_path[:0] = self._finders
        importlib.util.spec_from_file_location = _spec_of_file(self._spec_of_file)
        for name, module in self._modules.items():
            self._before[name] = sys.modules.get(name)
            # importlib.util.find_spec needs a module spec
            module.__spec__ = module.__spec__ or importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        importlib.util.spec_from_file_location = self._spec_of_file
        for finder in self._finders:
            sys.meta_path.remove(finder)
        for name, module in self._before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        if self._environ is None:
            os.environ.pop("NVTE_PROJECT_BUILDING", None)
        else:
            os.environ["NVTE_PROJECT_BUILDING"] = self._environ
