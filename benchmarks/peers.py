"""Searches of other tools on the same question, for `benchmarks.search`.

- Calculon (github.com/calculon-ai/calculon, commit dd35b00d of its search): `llm-optimal-execution` of the complete space of a
model of
  22 billion parameters on 8 H100 GPUs, without host memory. It needs psutil and pandas.
- SimuMax (github.com/MooreThreads/SimuMax, first release, commit 2127d7d9): `StrategySearcher.search` for Llama-3-70B on 1,024 A100
  GPUs: TP, PP and recomputation. It has no global batch size: it chooses the largest micro-batch size for each strategy. It needs
  tqdm.

Their times are those of the tool as it is published. Calculon writes debug messages for each layout that nobody reads, which takes
most of its time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.layouts import LLAMA_3_70B

MEGATRON_22B: Final = (
    "--num-layers 48 --hidden-size 6144 --num-attention-heads 64 --seq-length 2048 --max-position-embeddings 2048 --bf16 "
    "--use-distributed-optimizer --sequence-parallel --tensor-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 4 "
    "--tokenizer-type NullTokenizer --vocab-size 51200"
)
"""The model of 22 billion parameters of Korthikanti et al. 2022, table 3, with its batch on 8 GPUs."""
LLAMA_3_70B_4096: Final = LLAMA_3_70B.replace("--seq-length 8192", "--seq-length 4096").replace(
    "--global-batch-size 1024", "--global-batch-size 2048"
)
CALCULON: Final = "llm-optimal-execution"
CALCULON_MODEL: Final = {
    "hidden": 6144, "feedforward": 24576, "seq_size": 2048, "attn_heads": 64, "attn_size": 96, "num_blocks": 48,
}  # fmt: skip
CALCULON_GPUS, CALCULON_BATCH = 8, 4
CALCULON_SYSTEM: Final = "systems/h100_80g_nvl8.json"
SIMUMAX_GPUS, SIMUMAX_LENGTH = 1024, 4096
SIMUMAX_SYSTEM: Final = "configs/system/a100_bf16.json"
SIMUMAX_MODEL: Final = {
    "hidden_size": 8192, "head_num": 64, "kv_head_num": 8, "head_size": 128, "intermediate_size": 28672, "layer_num": 80,
    "vocab_size": 128256, "use_swiglu": True,
}  # fmt: skip
_SIMUMAX_SEARCH: Final = """
import contextlib, json, os, sys
from simumax.core.config import ModelConfig, SystemConfig
from simumax.tuning.strategy_searcher import CANDIDATE_STRATEGY, StrategySearcher
model, system, world, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
searcher = StrategySearcher(ModelConfig.init_from_config_file(model), SystemConfig.init_from_config_file(system))
candidates = dict(CANDIDATE_STRATEGY, world_size=[world], seq_len=[length])
count = len(searcher.generate_grid(candidates))
with open(os.devnull, "w") as hidden, contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
    searcher.search(topk=5, candidate_strategy=candidates)
print(json.dumps({"layouts": count, "fit": len(searcher.strategies)}))
"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A search of another tool."""

    seconds: float
    """Of the whole command, with its start."""
    layouts: int
    """Layouts that it computes."""
    fit: int
    """Layouts of these that fit."""


def calculon(checkout: Path, *, processes: int) -> Peer:
    """Runs the search of Calculon. Raises OSError or ValueError if the checkout is another one."""
    system = json.loads((checkout / CALCULON_SYSTEM).read_text())
    system["mem2"]["GiB"] = 0
    with tempfile.TemporaryDirectory() as folder:
        files = {"model.json": CALCULON_MODEL, "system.json": system}
        for name, content in files.items():
            Path(folder, name).write_text(json.dumps(content))
        sizes = [str(CALCULON_GPUS), str(CALCULON_BATCH), "float16"]
        names = [f"{folder}/{name}" for name in ("system.json", "best.json")]
        words = ["bin/calculon", CALCULON, f"{folder}/model.json", *sizes, *names, "-c", str(processes)]
        seconds, output = _timed(words, checkout)
    count, fit = (int(_number(output, name)) for name in ("Total", "Good"))
    return Peer(seconds=seconds, layouts=count, fit=fit)


def simumax(checkout: Path) -> Peer:
    """Runs the search of SimuMax in one process. Raises OSError or ValueError if the checkout is another one."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model.json")
        model.write_text(json.dumps(SIMUMAX_MODEL))
        words = ["-c", _SIMUMAX_SEARCH, str(model), SIMUMAX_SYSTEM, str(SIMUMAX_GPUS), str(SIMUMAX_LENGTH)]
        seconds, output = _timed(words, checkout)
    found = json.loads(output.splitlines()[-1])
    return Peer(seconds=seconds, layouts=found["layouts"], fit=found["fit"])


def _timed(words: list[str], checkout: Path) -> tuple[float, str]:
    """Seconds of a Python command in a checkout, and what it prints. Raises ValueError with its last line if it fails."""
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=checkout, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{checkout}: {(done.stderr.splitlines() or ['no message'])[-1]}")
    return time.perf_counter() - start, done.stdout + done.stderr


def _number(output: str, name: str) -> str:
    found = re.search(rf"{name} executions: (\d+)", output)
    if found is None:
        raise ValueError(f"Calculon does not print its number of executions: {output[-200:]!r}")
    return found.group(1)
