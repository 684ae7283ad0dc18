"""The GPUs and nodes that a script sees: those of this machine's driver, those of the job, or eight on one node."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context
from analyzer.script.stand_ins.words import whole

GPUS = 8
DRIVER = "/proc/driver/nvidia"
GPU_VARIABLES = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "GPUS_PER_NODE", "NUM_GPUS_PER_NODE", "NPROC_PER_NODE")
NODE_VARIABLES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NNODES", "NUM_NODES", "NODE_COUNT", "N_NODES", "PET_NNODES")
FLAGS = frozenset({"-L", "--list-gpus", "-q", "--query", "-x", "--xml-format", "-a", "-h", "--help", "--version", "--debug", "-v"})
WITH_VALUE = frozenset({"-i", "--id", "-f", "--filename", "-d", "--display", "-l", "--loop", "-lms", "--loop-ms", "--format", "-u"})
PRINTING = (
    "--query-",
    "--help-query-",
    "--format=",
    "--id=",
    "--display=",
    "--filename=",
    "--loop=",
    "--loop-ms=",
    "-l=",
    "-i=",
    "-lms=",
)
SUBCOMMANDS = frozenset({"topo", "nvlink"})
"""Subcommands that only print, without changing options."""
CHANGING_PARTS = frozenset({"-sLowPwrThres", "-sC", "-r", "-sBwMode", "-re", "--reseterrorcounters"})
"""Options of these subcommands that set something."""
UNITS = {"memory": " MiB", "utilization": " %", "power": " W", "enforced": " W", "clocks": " MHz"}
"""Units that nvidia-smi prints, by the first part of the name of a field."""
CAPABILITIES = {
    "B300": "10.3", "B200": "10.0", "H100": "9.0", "H200": "9.0", "H800": "9.0", "H20": "9.0", "GH200": "9.0", "A100": "8.0",
    "A800": "8.0", "A30": "8.0", "L40": "8.9", "L40S": "8.9", "L20": "8.9", "A40": "8.6", "A10": "8.6", "V100": "7.0", "T4": "7.5",
}  # fmt: skip
UNKNOWN_NAME = "NVIDIA GPU"


def of_job() -> int:
    """The number of GPUs of a node of the job, or eight."""
    return next((found for name in GPU_VARIABLES if (found := whole(os.environ.get(name, "").rpartition(":")[2]))), GPUS)


def nodes_of_job() -> int:
    """The number of nodes of the job, or one. WORLD_SIZE counts GPUs, or nodes if they do not fill a node."""
    direct = next((found for name in NODE_VARIABLES if (found := whole(os.environ.get(name)))), None)
    world = whole(os.environ.get("WORLD_SIZE"))
    if direct is not None or world is None:
        return direct or 1
    return world // of_job() if world % of_job() == 0 else world


def of_driver() -> list[tuple[str, str]]:
    """Name and UUID of each GPU of the driver, which says so where the devices themselves are hidden."""
    folder = os.path.join(DRIVER, "gpus")
    found: list[tuple[str, str]] = []
    try:
        places = sorted(os.listdir(folder))
    except OSError:
        return []
    for place in places:
        try:
            with open(os.path.join(folder, place, "information"), encoding="utf-8", errors="replace") as file:
                rows = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:
            continue
        found.append((rows.get("Model", UNKNOWN_NAME).strip(), rows.get("GPU UUID", f"GPU-{len(found)}").strip()))
    return found


def counted_by_python(code: str) -> bool:
    """Prints the number of GPUs if the Python code prints PyTorch's: no GPU is visible here. Returns whether it did."""
    if context.run_all() or "print(torch.cuda.device_count())" not in code:
        return False
    count = len(of_driver()) or of_job()
    context.say(f"no GPU is found: torch.cuda.device_count() is {count}")
    os.write(1, f"{count}\n".encode())
    return True


def nvidia_smi(words: list[str]) -> int:
    """Prints the GPUs. Options that set something, and any that are not known to print, are not run."""
    if context.run_all() and context.behind("nvidia-smi") is not None:
        return context.run_behind("nvidia-smi", words)
    if not _only_prints(words):
        return context.not_run(["nvidia-smi", *words])
    gpus = of_driver()
    if not gpus:
        gpus = [(UNKNOWN_NAME, f"GPU-{index}") for index in range(of_job())]
        context.say(f"nvidia-smi finds no driver: {len(gpus)} GPUs are printed")
    if words[:1] and words[0] in SUBCOMMANDS:
        return 0
    lines = _lines(words, [(index, *gpu) for index, gpu in enumerate(gpus)])
    os.write(1, "".join(f"{line}\n" for line in lines).encode())
    return 0


def _only_prints(words: list[str]) -> bool:
    if words[:1] and words[0] in SUBCOMMANDS:
        return not CHANGING_PARTS & set(words)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1 + (word in WITH_VALUE)
        if word not in FLAGS and word not in WITH_VALUE and not word.startswith(PRINTING):
            return False
    return True


def _lines(words: list[str], gpus: list[tuple[int, str, str]]) -> list[str]:
    options = set(words)
    count = len(gpus)
    chosen = _value(words, ("-i", "--id"))
    if chosen is not None:
        kept = chosen.split(",")
        gpus = [gpu for gpu in gpus if str(gpu[0]) in kept or gpu[2] in kept]
    query = _value(words, ("--query-gpu",))
    if query is not None:
        return _table(query, _value(words, ("--format",)) or "", gpus, count)
    if any(word.startswith(("--query-", "--help")) or word == "-h" for word in words):
        return []
    if options & {"-L", "--list-gpus"}:
        return [f"GPU {index}: {name} (UUID: {uuid})" for index, name, uuid in gpus]
    if options & {"-q", "--query"}:
        heads = [f"Attached GPUs                             : {count}"]
        return heads + [
            line for index, name, _ in gpus for line in (f"GPU 00000000:{index:02X}:00.0", f"    Product Name : {name}")
        ]
    if "--version" in options:
        return [f"NVIDIA-SMI version  : {_driver_version()}", f"DRIVER version      : {_driver_version()}"]
    head = f"| NVIDIA-SMI {_driver_version()}    Driver Version: {_driver_version()} |"
    return [head, *(f"|{index:4}  {name:32}  | 00000000:{index:02X}:00.0 |" for index, name, _ in gpus)]


def _table(query: str, form: str, gpus: list[tuple[int, str, str]], count: int) -> list[str]:
    """The lines of `--query-gpu`. A field without a known value is 0, so that scripts can count with it."""
    fields = [field.strip() for field in query.split(",")]
    units = "nounits" not in form
    lines = (
        []
        if "noheader" in form
        else [", ".join(field + (f" [{_unit(field).strip()}]" if _unit(field) else "") for field in fields)]
    )
    for index, name, uuid in gpus:
        size = next((word[:-2] for word in name.replace("-", " ").split() if word.endswith("GB") and word[:-2].isdecimal()), "0")
        capability = next((value for model, value in CAPABILITIES.items() if model in name.replace("-", " ").split()), "0")
        known = {
            "count": str(count), "name": name, "gpu_name": name, "index": str(index), "uuid": uuid, "gpu_uuid": uuid,
            "driver_version": _driver_version(), "compute_cap": capability, "memory.total": str(int(size) * 1024),
            "memory.free": str(int(size) * 1024), "pci.bus_id": f"00000000:{index:02X}:00.0",
        }  # fmt: skip
        lines.append(", ".join(known.get(field, "0") + (_unit(field) if units else "") for field in fields))
    return lines


def _unit(field: str) -> str:
    return UNITS.get(field.partition(".")[0], "") if "." in field else ""


def _driver_version() -> str:
    try:
        with open(os.path.join(DRIVER, "version"), encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return "0"
    return next((word for word in words if word[:1].isdecimal() and "." in word), "0")


def _value(words: list[str], names: tuple[str, ...]) -> str | None:
    """The value of an option, after `=` or in the next word."""
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[position + 1 :]), "")
    return None
