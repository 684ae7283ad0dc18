"""Writes the containers of all recipes of Megatron-Bridge, as `tools/score_recipes.py` reads them.

    PYTHONPATH=BRIDGE/src:MEGATRON python tools/bridge_containers.py OUT [--only TEXT]

BRIDGE and MEGATRON are checkouts of Megatron-Bridge and of the Megatron-LM that it names. It runs on a CPU, in an environment with
PyTorch, transformers, peft, datasets, OmegaConf and hydra-core. Libraries that need a GPU are replaced by empty modules, and
configurations of models are those that the program knows by name. For each recipe OUT has the container as the recipe returns it
(recipe/NAME.yaml) and after `runtime_config_update` (setup/NAME.yaml), and refused.json has the recipes that the setup refuses.
"""

from __future__ import annotations

import abc
import argparse
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import pkgutil
import re
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analyzer.launch.model_config.published import read_configuration  # noqa: E402
from analyzer.specs.vision_part import NEMOTRON  # noqa: E402

_REPLACED: Final = (
    "triton", "transformer_engine", "modelopt", "nvidia_resiliency_ext", "wandb", "mlflow", "comet_ml", "fla", "timm", "open_clip",
    "flashinfer", "flash_attn", "fast_hadamard_transform", "nvdlfw_inspect", "deep_ep", "mamba_ssm", "causal_conv1d",
    "multistorageclient", "qwen_vl_utils", "diffusers", "tensorboard", "torch.utils.tensorboard", "google", "torchvision",
    "torchaudio", "megatron.energon", "easydict", "cudnn", "av", "decord", "librosa", "soundfile", "nvtx", "tilelang", "nemo_run",
    "scipy", "mistral_common", "soxr", "imageio", "PIL",
)  # fmt: skip
"""Libraries whose modules have empty classes here."""
_PACKAGES: Final = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")
_BLACKWELL: Final = ("_gb200", "_b200", "_gb300", "_b300", "_vr200", "_r100")
_OF_A_KIND: Final = {"kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM")}
"""Kinds of models that transformers reads with the code of another one."""
_OWN_CODE: Final = {kind: kind for kind in NEMOTRON} | {"kimi_k25": "KimiK25ForConditionalGeneration"}
"""Architectures of the kinds whose code is not in transformers."""


class _Empty(abc.ABCMeta):
    """A class whose attributes are such classes, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)

    def __or__(cls, _: object) -> Any:
        return object

    def __ror__(cls, _: object) -> Any:
        return object


def _empty(name: str) -> Any:
    def called(self: Any, *values: Any, **named: Any) -> Any:
        return values[0] if len(values) == 1 and callable(values[0]) and not named else self  # a decorator returns its function

    def attribute(_: Any, inner: str) -> Any:
        if inner.startswith("__"):
            raise AttributeError(inner)
        return _empty(inner)

    members = {
        "__init__": lambda *_, **__: None,
        "__call__": called,
        "__getattr__": attribute,
        "__class_getitem__": classmethod(lambda cls, _: cls),
    }
    return _Empty(name, (), members)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _empty(name))
        return self.__dict__[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_: Any, **__: Any) -> importlib.machinery.ModuleSpec | None:
        replaced = any(fullname == each or fullname.startswith(f"{each}.") for each in _REPLACED)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if replaced else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _of_own_code(transformers: Any, kind: str, fields: dict[str, Any]) -> Any:
    """The configuration of a model with parts for images, as `AutoBridge` reads it."""
    part = "llm_config" if kind in NEMOTRON else "text_config"
    text = dict(fields.pop(part))
    inner = _OF_A_KIND.get(str(text.pop("model_type")))
    found = transformers.PretrainedConfig(**fields)
    setattr(found, part, transformers.AutoConfig.for_model(inner[0], **text) if inner else transformers.PretrainedConfig(**text))
    found.vision_config = types.SimpleNamespace(**fields.get("vision_config", {}))
    if fields.get("sound_config"):
        found.sound_config = transformers.PretrainedConfig(**fields["sound_config"])
    found.sound_context_token_id = 1
    return found


def _prepare() -> None:
    """Replaces libraries, configurations from the network, and what needs a GPU."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    vars(typing).setdefault("override", lambda function: function)  # Python 3.11 has none
    time.sleep = lambda _: None  # between attempts to download a configuration
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    importlib.import_module("torch._inductor.compile_fx")  # before triton is replaced
    sys.meta_path.insert(0, _Finder())
    architectures = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    of_text = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def from_pretrained(_: Any, name: str, *__: Any, **___: Any) -> Any:
        fields: dict[str, Any] = dict(read_configuration(str(name), folder=Path("/nowhere")).values)
        kind = str(fields.pop("model_type"))
        kind, named = _OF_A_KIND.get(kind, (kind, architectures.get(kind) or of_text.get(kind)))
        found = _of_own_code(transformers, kind, fields) if kind in _OWN_CODE else transformers.AutoConfig.for_model(kind, **fields)
        named = _OWN_CODE.get(kind, named)
        found.architectures, found.dtype, found._name_or_path = [named], torch.bfloat16, str(name)
        if kind == "glm_moe_dsa":
            found.indexer_rope_interleave = True
        return found

    transformers.AutoConfig.from_pretrained = classmethod(from_pretrained)

    class FusedAdam:
        def __init__(
            self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
        ) -> None: ...

    vars(importlib.import_module("transformer_engine.pytorch.optimizers"))["FusedAdam"] = FusedAdam
    importlib.import_module("megatron.bridge")
    replaced: dict[str, Callable[..., Any]] = {
        "is_te_min_version": lambda *_, **__: True,
        "_validate_dsa_kernel_backend_dependencies": lambda *_: None,
    }
    for name, module in list(sys.modules.items()):
        for function, instead in replaced.items():
            if name.startswith("megatron.") and function in vars(module):
                setattr(module, function, instead)


def _recipes() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names and functions of all recipes without required arguments."""
    for package in _PACKAGES:
        modules = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        for found in modules:
            module = importlib.import_module(found.name)
            for name, function in list(vars(module).items()):
                own = inspect.isfunction(function) and function.__module__ == found.name
                if not own or not name.endswith("_config") or name.startswith(("_", "default_", "build_")):
                    continue
                if all(each.default is not each.empty for each in inspect.signature(function).parameters.values()):
                    yield ("perf__" if "perf_recipes" in package else "") + name, function


def gpus_of(name: str) -> int:
    """The number of GPUs in the name of a recipe; 8 if there is none."""
    found = re.search(r"_(\d+)gpu", name)
    return int(found[1]) if found else 8


def _setup(container: Any, name: str, checkpoint: Path) -> None:
    """Applies the setup of the training. Raises what it raises."""
    cuda: Any = importlib.import_module("torch").cuda
    capability = (10, 0) if any(gpu in name for gpu in _BLACKWELL) else (9, 0)
    gpu = types.SimpleNamespace(
        major=capability[0], minor=0, name="NVIDIA B200" if capability[0] == 10 else "NVIDIA H100", multi_processor_count=132
    )
    cuda.get_device_capability = lambda *_: capability
    cuda.get_device_properties = lambda *_: gpu
    cuda.current_device = lambda: 0
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": str(gpus_of(name)), "RANK": "0", "LOCAL_RANK": "0"}
    if container.checkpoint.pretrained_checkpoint is None and container.peft is not None:
        container.checkpoint.pretrained_checkpoint = str(checkpoint)
    if getattr(container.dataset, "path_to_cache", "") is None:
        container.dataset.path_to_cache = str(checkpoint)
    try:
        importlib.import_module("megatron.bridge.training.config").runtime_config_update(container)
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the containers. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="recipes whose name has this text")
    args = parser.parse_args(argv)
    _prepare()
    for folder in ("recipe", "setup"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    refused, unknown = {}, 0
    for name, recipe in _recipes():
        if args.only not in name:
            continue
        try:
            container = recipe()
        except Exception:  # the configuration of the model is not known, or the library cannot be imported here
            unknown += 1
            continue
        container.to_yaml(str(args.out / "recipe" / f"{name}.yaml"))
        try:
            _setup(container, name, args.out)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
            continue
        container.to_yaml(str(args.out / "setup" / f"{name}.yaml"))
    (args.out / "refused.json").write_text(json.dumps(refused, indent=1), encoding="utf-8")
    print(f"{len(list((args.out / 'setup').iterdir()))} containers; {len(refused)} refused by the setup; {unknown} not built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
