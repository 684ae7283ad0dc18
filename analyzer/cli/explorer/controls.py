"""The controls of the explorer: for each dimension of a launch its choices, and why Megatron refuses some of them.

The engine decides which choices are legal: the job of the launch with the options of a choice is derived as for the command line. A
choice that needs other options, such as sequence parallelism, brings them, as a layout of a search does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from analyzer.api import layout_problem
from analyzer.cli.explorer.state import Read, State, changed
from analyzer.errors import AnalyzerError, InputError
from analyzer.hardware.gpus import GPUS, hardware
from analyzer.launch.derive.recompute import MODULES
from analyzer.launch.launchers.world import World
from analyzer.layout_search.dimensions import USUAL, Space
from analyzer.layout_search.options import by_flag, changes_of
from analyzer.layout_search.problem import Problem
from analyzer.layout_search.related import length_changes
from analyzer.layout_search.smallest_change import with_values
from analyzer.layout_search.space import Recompute, Stages
from analyzer.units import ceil_div

POWERS: Final = (1, 2, 4, 8, 16)
SEQUENCES: Final = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
MOST_STAGES: Final = 16
MOST_CHOICES: Final = 8
"""Choices of virtual stages."""
GPUS_FACTORS: Final = (0.25, 0.5, 1, 2, 4)
BATCHES: Final = (128, 256, 512, 1024, 2048)
PRECISIONS: Final[Mapping[str, str]] = {
    "bf16": "bf16", "fp16": "fp16", "delayed": "fp8, delayed scaling", "tensorwise": "fp8, tensorwise",
    "blockwise": "fp8, blockwise", "mxfp8": "mxfp8",
}  # fmt: skip
OF_FP8: Final = ("fp8_param_gather", "first_last_layers_bf16", "fp4", "fp4_recipe", "fp4_param")
"""Options that need fp8 or fp4, or contradict it."""
OF_EXPERTS: Final = ("moe", "moe_act", "shared_experts")
"""Modules that only a model with experts has."""
FREE: Final = ("gpus", "global_batch", "sequence")
"""Controls that take any number."""


class Try(NamedTuple):
    """One way to make a choice."""

    changes: Mapping[str, object]
    """Options by dest."""
    problem: Problem | None = None
    """With another GPU or another number of GPUs."""


class Control(NamedTuple):
    """A control before its choices are tried."""

    name: str
    label: str
    present: object
    choices: Sequence[object]
    tries: Callable[[Any], Iterable[Try]]
    text: Callable[[Any], str] = str
    help: str = ""


def controls_json(read: Read, *, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The controls of a launch with their choices; only those in `names`, if there are any."""
    maker = _Controls(read)
    return [_json(maker, each) for each in maker.all() if not names or each.name in names]


def with_value(read: Read, name: str, value: object) -> State:
    """The state with another value of a control. Raises AnalyzerError if Megatron refuses it."""
    maker = _Controls(read)
    control = next((each for each in maker.all() if each.name == name), None)
    if control is None or name not in FREE or not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(name, f"{value!r:.40} is not a number that can be chosen", "write a whole number of 1 or more")
    return maker.state(control, value)


def _json(maker: _Controls, control: Control) -> dict[str, Any]:
    choices = []
    for value in control.choices:
        choice: dict[str, Any] = {"value": _key(control, value), "text": control.text(value), "selected": value == control.present}
        try:
            choice["change"] = maker.state(control, value).changes_json() if value != control.present else None
        except AnalyzerError as error:
            choice["reason"] = str(error)
        choices.append(choice)
    return {
        "name": control.name,
        "label": control.label,
        "help": control.help,
        "value": _key(control, control.present),
        "free": control.name in FREE,
        "choices": choices,
    }


def _key(control: Control, value: object) -> str | int:
    return value if isinstance(value, str | int) else control.text(value)


class _Controls:
    """The controls of a launch."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.problem = layout_problem(read.launch)
        self.space = Space(problem=self.problem, over=frozenset(USUAL))
        self.job = read.launch.job
        self.parallel = self.job.parallel

    def state(self, control: Control, value: object) -> State:
        """The state with a choice: the first way to make it that Megatron accepts. Raises the error of the first otherwise."""
        first: AnalyzerError | None = None
        for each in control.tries(value):
            problem = each.problem or self.problem
            changes = {**self.problem.with_any_change, **each.changes}
            try:
                problem.job(changes)
            except AnalyzerError as error:
                first = first or error
                continue
            options = by_flag(changes, self.problem.arguments)
            if each.problem is None:
                return changed(self.read, options)
            return changed(self.read, options, gpu=each.problem.gpu.name, gpus=each.problem.world.size)
        raise first or InputError(control.label, f"{value} cannot be chosen", "choose another value")

    def all(self) -> Iterator[Control]:
        yield Control("gpu", "GPU", self.job.hardware.name, self._gpus(), self._of_gpu)
        yield self._world()
        yield from self._sizes()
        batch = self.job.batch
        yield self._sized("micro_batch", "Micro-batch size", batch.micro_batch_size, POWERS, "sequences at a time")
        sizes = {*BATCHES, batch.global_batch_size}
        yield Control(
            "global_batch", "Global batch size", batch.global_batch_size, sorted(sizes), self._of_global_batch, _number,
            "sequences of one iteration",
        )  # fmt: skip
        lengths = sorted({*SEQUENCES, batch.seq_length})
        yield Control("sequence", "Sequence length", batch.seq_length, lengths, self._of_length, _number, "tokens")
        yield self._recompute()
        present = self._precision()
        names = [*PRECISIONS, *([] if present in PRECISIONS else [present])]
        yield Control("precision", "Precision", present, names, self._of_precision, lambda name: PRECISIONS.get(name, name))

    def _gpus(self) -> list[str]:
        names = [gpu.name for gpu in GPUS]
        own = self.job.hardware.name
        return names if own in names or own is None else [own, *names]

    def _of_gpu(self, name: str) -> Iterator[Try]:
        spec, _ = hardware(name, None)
        yield Try({}, replace(self.problem, gpu=spec))

    def _world(self) -> Control:
        present = self.parallel.world_size
        sizes = sorted({present, *(int(present * factor) for factor in GPUS_FACTORS if present * factor >= 1)})
        return Control("gpus", "Number of GPUs", present, sizes, self._of_world, _number)

    def _of_world(self, size: int) -> Iterator[Try]:
        per_node = self.problem.world.gpus_per_node
        world = World(size // per_node, per_node) if size % per_node == 0 else World.of(size)
        yield Try({}, replace(self.problem, world=world))

    def _sizes(self) -> Iterator[Control]:
        parallel, moe = self.parallel, self.job.model.moe
        yield self._sized("tensor", "TP", parallel.tensor, POWERS, "ranks that share each layer")
        stages = [each for each in range(1, MOST_STAGES + 1) if each in POWERS or parallel.world_size % each == 0]
        yield Control(
            "pipeline", "PP", parallel.pipeline, sorted({*stages, parallel.pipeline}), self._of_stages, help="pipeline stages"
        )
        yield self._virtual()
        yield self._sized("context", "CP", parallel.context, POWERS, "ranks that share each sequence")
        experts = [1] if moe is None else [each for each in range(1, 65) if moe.num_experts % each == 0]
        shown = experts if moe is None else [each for each in experts if each & (each - 1) == 0]
        yield self._sized(
            "expert", "EP", parallel.expert, shown, "ranks that share the experts" if moe else "the model has no experts"
        )

    def _sized(self, name: str, label: str, present: int, choices: Sequence[int], text: str) -> Control:
        """A size of the split of a layout."""

        def tries(value: int) -> Iterator[Try]:
            yield Try(self._changes({name: value}))

        return Control(name, label, present, sorted({*choices, present}), tries, help=text)

    def _changes(self, values: dict[str, object]) -> dict[str, object]:
        layout = with_values(self.space, values)
        return changes_of(layout, {}, self.problem.arguments, layers=self.space.scale.layers)

    def _of_stages(self, pipeline: int) -> Iterator[Try]:
        """Another number of stages, with as many virtual ones if that is legal."""
        for virtual in dict.fromkeys((self.parallel.chunks, 1)):
            yield Try(self._changes({"stages": Stages(pipeline, virtual)}))

    def _virtual(self) -> Control:
        pipeline, present = self.parallel.pipeline, self.parallel.chunks
        layers = ceil_div(self.space.scale.layers, pipeline)
        possible = [each for each in range(1, layers + 1) if layers % each == 0]
        choices = sorted({*possible[:MOST_CHOICES], 1, 2, 4, present})

        def tries(value: int) -> Iterator[Try]:
            yield Try(self._changes({"stages": Stages(pipeline, value)}))

        return Control("virtual", "VPP", present, choices, tries, help="virtual stages of each rank")

    def _recompute(self) -> Control:
        spec = self.job.recompute
        present = Recompute(spec.granularity, spec.method, spec.num_layers, spec.modules)
        layers = ceil_div(self.space.scale.layers, self.parallel.pipeline * self.parallel.chunks)
        powers = [1 << power for power in range(layers.bit_length())]
        modules = [each for each in MODULES if self.job.model.moe is not None or each not in OF_EXPERTS]
        single = [Recompute("selective", modules=(module,)) for module in modules]
        choices = [Recompute(), *filter(self._has_effect, single), Recompute("full", "uniform", 1)]
        choices += [Recompute("full", "block", each) for each in powers if each < layers]
        if present not in choices:
            choices.insert(1, present)

        def tries(value: Recompute) -> Iterator[Try]:
            yield Try(self._changes({"recompute": value}))

        return Control("recompute", "Recomputation", present, choices, tries, _text_of_recompute)

    def _has_effect(self, recompute: Recompute) -> bool:
        """Whether the model has a module that is recomputed. A choice that is refused counts, so that its reason is shown."""
        try:
            return bool(self.problem.job(self._changes({"recompute": recompute})).recompute.modules)
        except AnalyzerError:
            return True

    def _of_global_batch(self, size: int) -> Iterator[Try]:
        yield Try({"global_batch_size": size})

    def _of_length(self, length: int) -> Iterator[Try]:
        changes = length_changes(self.problem, length)
        if changes["max_position_embeddings"] == self.problem.arguments.get("max_position_embeddings"):
            del changes["max_position_embeddings"]
        yield Try(changes)

    def _precision(self) -> str:
        arguments = self.problem.arguments
        if arguments.get("fp8"):
            return str(arguments.get("fp8_recipe") or "delayed")
        if arguments.get("fp4"):
            return f"fp4 ({arguments.get('fp4_recipe')})"
        return next((name for name in ("bf16", "fp16") if arguments.get(name)), "fp32")

    def _of_precision(self, name: str) -> Iterator[Try]:
        arguments = self.problem.arguments
        changes: dict[str, object] = {"fp16": name == "fp16", "bf16": name != "fp16"}
        if name in ("bf16", "fp16"):
            changes |= {"fp8": None, "fp8_recipe": None, **dict.fromkeys(OF_FP8)}
        else:
            changes |= {"fp8": "e4m3" if name == "mxfp8" else "hybrid", "fp8_recipe": name, "fp4": None, "fp4_recipe": None}
        yield Try({dest: value for dest, value in changes.items() if value or arguments.get(dest)})


def _number(value: int) -> str:
    return f"{value:,}"


def _text_of_recompute(value: Recompute) -> str:
    if value.granularity is None:
        return "none"
    if value.granularity == "selective":
        return " + ".join(value.modules)
    layers = f"{value.layers} layer{'s' if value.layers != 1 else ''}"
    return f"full, {value.method}, {layers}"
