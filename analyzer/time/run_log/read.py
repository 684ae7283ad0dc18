"""Reads the log of a run, line by line: logs of long runs are large."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from analyzer.errors import InputError
from analyzer.files import refuse_special_file
from analyzer.time.run_log import lines
from analyzer.time.run_log.record import Iteration, Memory, RunLog, Timer
from analyzer.units import MIB

OPTION: Final = "--info-log"
REMEDY: Final = "give the output of a Megatron run, with lines such as 'elapsed time per iteration (ms): 1234.5'"
LONGEST: Final = 65_536
"""Characters of a line that are read at once."""
SHORTEST, LONGEST_ITERATION = 1e-6, 1e6
"""Seconds of an iteration; other values are not used."""
TIMERS: Final = frozenset({
    "forward-backward", "forward-compute", "backward-compute", "optimizer", "all-grads-sync", "grads-reduce-scatter",
    "grads-all-reduce", "params-all-gather", "batch-generator",
})  # fmt: skip
"""Timers that are read. Others are parts of these, or run before the training."""


def read_log(path: str | Path) -> RunLog:
    """The log in a file. Raises InputError if it cannot be read, or has no iteration."""
    found = parse_file(path, OPTION, REMEDY)
    if found is None:
        raise InputError(OPTION, f"'{path}' has no iteration of a training", REMEDY)
    return found


def parse_file(path: str | Path, option: str, remedy: str) -> RunLog | None:
    """The log in a file; None if it has no iteration. Raises InputError for `option` if it cannot be read."""
    refuse_special_file(path, option, remedy)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return parse(_pieces(file), str(path))
    except OSError as error:
        raise InputError(option, f"cannot read '{path}' ({error.strerror or error})", remedy) from None


def parse(text: Iterable[str], path: str = "") -> RunLog | None:
    """What the lines of a log say; None if there is no iteration among them."""
    state = _State()
    for line in text:
        state.read(lines.COLOURS.sub("", line) if "\x1b" in line else line)
    iterations = state.iterations or state.steps
    if not iterations:
        return None
    return RunLog(
        path=path,
        iterations=iterations,
        memory=state.memory,
        parameters=state.parameters,
        total_parameters=state.total_parameters,
        theoretical_bytes=state.theoretical_bytes,
        facts=state.facts,
        timers=state.timers,
        retries=state.retries,
    )


def _pieces(file: TextIO) -> Iterator[str]:
    """The lines of a file; longer ones than `LONGEST` in pieces."""
    return iter(lambda: file.readline(LONGEST), "")


@dataclass
class _State:
    """What was read so far."""

    iterations: list[Iteration] = field(default_factory=list)
    steps: list[Iteration] = field(default_factory=list)
    """Of lines of Megatron-Bridge that have no number."""
    memory: dict[int, Memory] = field(default_factory=dict)
    parameters: dict[tuple[int, int], int] = field(default_factory=dict)
    total_parameters: float | None = None
    theoretical_bytes: int | None = None
    facts: dict[str, int] = field(default_factory=dict)
    timers: dict[str, list[Timer]] = field(default_factory=lambda: defaultdict(list))
    retries: int = 0
    pending: float | None = None
    """TFLOP/s of a line of Megatron-Bridge whose iteration follows."""
    timer: str = ""
    """The timer whose ranks follow."""

    def read(self, line: str) -> None:
        """Adds what a line says. Outputs of several ranks may stand in one line."""
        if "teration" in line:
            self._iteration(line)
            self._memory(line)
        if "Step Time" in line:
            self._step(line)
        if "number of parameters" in line:
            self._parameters(line)
        if "Theoretical memory" in line and (found := lines.THEORETICAL.search(line)):
            self.theoretical_bytes = round(float(found[1]) * MIB)
        if "using world size" in line or " ..." in line:
            self._facts(line)
        self._timer(line)

    def _iteration(self, line: str) -> None:
        number = lines.ITERATION.search(line)
        elapsed = lines.ELAPSED.search(line)
        nemo = None if elapsed else lines.NEMO_SECONDS.search(line)
        if number is None or (elapsed is None and nemo is None):
            return
        seconds = float(elapsed[2]) / (1000 if elapsed[1] == "ms" else 1) if elapsed else float(nemo[1]) if nemo else 0.0
        if not SHORTEST <= seconds <= LONGEST_ITERATION:
            return
        batch = lines.BATCH.search(line)
        given = _tflops(line)
        tflops = self.pending if given is None else given
        found = Iteration(int(number[1]) + (nemo is not None), seconds, tflops, None if batch is None else int(batch[1]))
        self.pending = None
        last = self.iterations[-1] if self.iterations else None
        if last is not None and found.number <= last.number:
            if found.number == last.number and found.seconds == last.seconds:
                return  # a copy of the line: two nodes, or a terminal and a file
            found = found._replace(restarted=True)
        self.iterations.append(found)

    def _step(self, line: str) -> None:
        found = lines.STEP_TIME.search(line)
        if found is None or not SHORTEST <= float(found[1]) <= LONGEST_ITERATION:
            return
        self.pending = _tflops(line)
        self.steps.append(Iteration(len(self.steps) + 1, float(found[1]), self.pending))

    def _memory(self, line: str) -> None:
        for found in lines.MEMORY.finditer(line):
            values = (round(float(found[index]) * MIB) for index in range(3, 7))
            self.memory[int(found[1] or 0)] = Memory(int(found[2]), *values)
        bridge = lines.BRIDGE_MEMORY.search(line)
        if bridge is None:
            return
        sizes = {name: round(float(value) * 1e9) for name, value in lines.BRIDGE_GIGABYTES.findall(line)}
        if {"allocated", "max-allocated", "reserved", "max-reserved"} <= sizes.keys():
            values = (sizes[name] for name in ("allocated", "max-allocated", "reserved", "max-reserved"))
            self.memory[int(bridge[1])] = Memory(int(bridge[2]), *values)
        if retries := lines.RETRIES.search(line):
            self.retries = max(self.retries, int(retries[1]))

    def _parameters(self, line: str) -> None:
        for found in lines.RANK_PARAMETERS.finditer(line):
            self.parameters[int(found[1]), int(found[2])] = int(found[3])
        for found in lines.OLD_PARAMETERS.finditer(line):
            self.parameters[int(found[1]), 0] = int(found[2])
        if total := lines.TOTAL_PARAMETERS.search(line):
            self.total_parameters = float(total[1]) * 1e9

    def _facts(self, line: str) -> None:
        if "using world size" in line:
            for name, value in lines.SIZES.findall(line):
                self.facts[f"{name.replace('-', '_')}_size"] = int(value)
        elif found := lines.ARGUMENT.search(line):
            self.facts[found[1]] = int(found[2])

    def _timer(self, line: str) -> None:
        if " .." in line and ": " in line:
            for found in lines.TIMER.finditer(line):
                self._add_timer(found[1], float(found[2] or found[4]), float(found[3] or found[4]))
        elif self.timer and (of_rank := lines.TIMER_OF_RANK.search(line)):
            self._add_timer(self.timer, float(of_rank[2]), float(of_rank[2]))
        elif line.rstrip().endswith(":"):
            name = lines.TIMER_NAME.search(line)
            self.timer = name[1] if name and name[1] in TIMERS else ""

    def _add_timer(self, name: str, least: float, most: float) -> None:
        """Adds a value in milliseconds. Those of several ranks after one iteration become one."""
        if name not in TIMERS:
            return
        after, values = len(self.iterations or self.steps), self.timers[name]
        if values and values[-1].after == after:
            last = values.pop()
            least, most = min(1000 * last.least, least), max(1000 * last.most, most)
        values.append(Timer(after, least / 1000, most / 1000))


def _tflops(line: str) -> float | None:
    """TFLOP/s for each GPU; None if the line does not have them, or has 0."""
    for pattern in lines.TFLOPS:
        if found := pattern.search(line):
            return float(found[1]) or None
    return None


def looks_like_json(path: Path) -> bool:
    """Whether the first character of a file that is not a space begins a JSON object."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return re.match(r"\s{0,1000}\{", file.read(4096)) is not None
    except OSError:
        return False
