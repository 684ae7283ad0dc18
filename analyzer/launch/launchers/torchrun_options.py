"""The options of torchrun (torch.distributed.run in torch 2.13, and torch.distributed.launch)."""

from __future__ import annotations

from typing import Final, NamedTuple

from analyzer.errors import InputError

WITH_VALUE: Final = (
    "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts", "monitor_interval",
    "start_method", "event_log_handler", "role", "log_dir", "redirects", "tee", "local_ranks_filter",
    "duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank", "master_addr", "master_port", "local_addr",
    "logs_specs", "numa_binding", "signals_to_handle", "shutdown_timeout",
)  # fmt: skip
WITHOUT_VALUE: Final = ("standalone", "module", "no_python", "run_path", "virtual_local_rank", "use_env")
SHORT: Final = {"-m": "module", "-r": "redirects", "-t": "tee"}

LONG: Final = {
    spelling: dest
    for dest in (*WITH_VALUE, *WITHOUT_VALUE)
    for spelling in ("--" + dest.replace("_", "-"), "--" + dest)
}  # fmt: skip


class TorchrunOption(NamedTuple):
    """An option of torchrun as given by one word."""

    dest: str
    written: str
    attached: str | None
    """The value in `--option=value` or `-t3`."""

    @property
    def takes_value(self) -> bool:
        return self.dest in WITH_VALUE


def find(word: str, *, abbreviated: bool) -> TorchrunOption | None:
    """The option that `word` gives, or None.

    `abbreviated`: unambiguous prefixes are accepted, as in argparse. Raises InputError for an ambiguous prefix, and for a value
    given to an option that takes none.
    """
    written, equals, value = word.partition("=")
    attached = value if equals else None
    dest = LONG.get(written) or SHORT.get(written)
    if dest is None and word[:2] in SHORT and SHORT[word[:2]] in WITH_VALUE:
        return TorchrunOption(SHORT[word[:2]], word[:2], word[2:])
    if dest is None and abbreviated and len(written) > 3:
        dest = _abbreviation(written)
    if dest is None:
        return None
    if attached is not None and dest not in WITH_VALUE:
        raise InputError(written, f"takes no value, and {attached!r} is given", f"write {written} without a value")
    return TorchrunOption(dest, written, attached)


def _abbreviation(written: str) -> str | None:
    """The dest of the option with the prefix `written`, None without one. Raises InputError if several have it."""
    dests = sorted({dest for spelling, dest in LONG.items() if spelling.startswith(written)})
    if len(dests) > 1:
        meant = " or ".join("--" + dest.replace("_", "-") for dest in dests)
        raise InputError(written, "is an ambiguous abbreviation", f"write {meant}")
    return dests[0] if dests else None
