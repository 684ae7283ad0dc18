"""Compares the launches of public examples of frameworks with what their files say.

    python tools/score_frameworks.py EXAMPLES.json CHECKOUTS [--only TEXT] [--show] [--json FILE] [--gpu NAME]

EXAMPLES.json lists the paths of examples by framework. CHECKOUTS is a folder with the checkouts ms-swift, verl, RL, Primus, ROLL
and slime. Each example is read by the program, and by `framework_values.py` and `framework_scripts.py`, which share nothing with
its readers. Compared are the number of GPUs, the sizes of parallelism, micro-batch, global batch, sequence length, precision,
layers, hidden size and experts of the model, and which and how many parameters are trained. Exit status 1: an answer is wrong.

An example is of a known model if the program has its published configuration, or if the example has all sizes, and no layers that
the framework adds to those of Megatron-LM. A refusal is right if the values of the file show that Megatron-LM refuses the launch
too. With `--gpu` a second table has the verdicts on this GPU by framework and objective.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from analyzer.api import Launch, _read_training, report_of  # noqa: E402
from analyzer.errors import AnalyzerError  # noqa: E402
from analyzer.modules.tree import parameters  # noqa: E402
from analyzer.passes.stages import full_model  # noqa: E402
from analyzer.predict.parameter_counts import parameter_counts  # noqa: E402
from analyzer.specs.rules import check_job  # noqa: E402
from tools import framework_scripts, framework_values  # noqa: E402
from tools.framework_values import Values, config_of  # noqa: E402

_SETS: Final[dict[str, tuple[str, Callable[[Path, Path], Values | None]]]] = {
    "ms-swift": ("ms-swift", framework_scripts.ms_swift),
    "verl": ("verl", framework_scripts.verl),
    "NeMo-RL": ("RL", framework_values.nemo_rl),
    "Primus": ("Primus", framework_values.primus),
    "ROLL": ("ROLL", framework_values.roll),
    "slime": ("slime", framework_scripts.slime),
}
"""By the first word of a list in EXAMPLES.json: the folder of the checkout, and the values of an example."""
ENVIRON: Final = {
    "BASE_FOLDER": "/root", "BASE_DIR": "/root", "MASTER_ADDR": "127.0.0.1", "RAY_DATA_HOME": "/root", "ckpts_home": "/root",
    "HOME": "/root",
}  # fmt: skip
"""Variables that scripts ask their users to set."""
SIZES: Final = ("gpus", "tensor", "pipeline", "context", "expert", "expert_tensor")


@dataclass(kw_only=True)
class Score:
    """One example."""

    framework: str
    path: str
    known: bool
    answered: bool = False
    wrong: list[str] = field(default_factory=list)
    refusal: str = ""
    rightly: str = ""
    """Why Megatron-LM refuses the launch too."""
    objective: str = ""
    verdict: str = ""
    """Its state, or "no verdict"; empty without a GPU."""

    @property
    def right(self) -> bool:
        """Whether the answer, or the refusal, is right."""
        return bool(self.rightly) if not self.answered else not self.wrong


def _answer(launch: Launch) -> Values:
    """The same values of a launch that the program read."""
    job = launch.job
    each, batch, model = job.parallel, job.batch, job.model
    tuning = job.tuning
    counted = _trained(launch)
    return Values(
        gpus=each.world_size, tensor=each.tensor, pipeline=each.pipeline, context=each.context, expert=each.expert,
        expert_tensor=each.expert_tensor, micro=batch.micro_batch_size, samples=batch.global_batch_size, length=batch.seq_length,
        precision=job.precision.parameters, layers=model.num_layers, hidden=model.hidden_size,
        experts=model.moe.num_experts if model.moe else 0,
        trained="adapters" if tuning.adapter else "parts" if tuning.frozen or model.frozen else "all", parameters=counted,
    )  # fmt: skip


def _trained(launch: Launch) -> int:
    """The number of parameters that are trained, without padding of the vocabulary; in Primus without embeddings."""
    model = launch.job.model
    whole = full_model(launch.job)
    counts = parameter_counts(model, whole)
    if model.vision_weights:
        frozen = sum(each.full_numel for each in parameters(whole) if each.frozen)
        return counts.adapters or counts.unpadded - frozen
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return counts.adapters if launch.job.tuning.adapter else counts.unpadded - (embeddings if launch.framework == "primus" else 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides what a script prints."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def score(
    framework: str, path: str, checkout: Path, values: Callable[[Path, Path], Values | None], *, gpu: str | None = None
) -> Score:
    """Reads one example in both ways."""
    said = values(checkout / path, checkout)
    known = said is not None and not said.own_layers
    known = known and said is not None and (config_of(said.model) is not None if said.model else said.layers is not None)
    found = Score(framework=framework, path=path, known=known)
    try:
        with _quiet():
            environ = {**ENVIRON, "PATH": os.environ["PATH"]}
            launch = _read_training([path], gpu=gpu, environ=environ, folder=checkout)
            check_job(launch.job)
            if gpu is not None:
                found.objective = launch.job.tuning.objective
                found.verdict = report_of(launch).verdict.state or "no verdict"
    except AnalyzerError as error:
        found.refusal = str(error)
        found.rightly = (said.refused or "") if said is not None else "trains without Megatron-LM"
        return found
    found.answered = True
    if said is None:
        found.wrong = ["no training with Megatron-LM was found in the file"]
        return found
    answer = _answer(launch)
    if launch.job.model.mtp_num_layers:  # transformers has no MTP layers
        said.parameters = None
    for name, value in asdict(said).items():
        if (
            name in ("model", "frozen", "uneven", "own_layers")
            or value is None
            or (name.startswith("expert_") and not said.experts)
        ):
            continue
        given = getattr(answer, name)
        if given != value:
            found.wrong.append(f"{name}: {value} in the file, {given} in the answer")
    return found


def _table(scores: list[Score]) -> Iterator[str]:
    yield f"{'framework':<12}{'listed':>8}{'known':>8}{'answered':>10}{'right':>8}{'rightly refused':>17}{'share':>8}"
    for name in [*dict.fromkeys(each.framework for each in scores), "all"]:
        listed = [each for each in scores if name in (each.framework, "all")]
        known = [each for each in listed if each.known]
        answered = [each for each in known if each.answered]
        right, refused = sum(each.right for each in answered), sum(each.right for each in known if not each.answered)
        share = f"{(right + refused) / len(known):.1%}" if known else ""
        yield f"{name:<12}{len(listed):>8}{len(known):>8}{len(answered):>10}{right:>8}{refused:>17}{share:>8}"


def _verdicts(scores: list[Score]) -> Iterator[str]:
    states = ("fits", "tight", "does not fit", "no verdict")
    yield f"{'framework':<12}{'objective':<16}" + "".join(f"{each:>14}" for each in states)
    for group in dict.fromkeys((each.framework, each.objective) for each in scores if each.verdict):
        listed = [each.verdict for each in scores if (each.framework, each.objective) == group]
        yield f"{group[0]:<12}{group[1]:<16}" + "".join(f"{listed.count(each):>14}" for each in states)


def _details(scores: list[Score]) -> Iterator[str]:
    for each in scores:
        if each.answered and each.right:
            continue
        kind = "wrong" if each.answered else "refused" if each.known else "unknown"
        reason = "; ".join(each.wrong) or each.refusal + (f" [rightly: {each.rightly}]" if each.rightly else "")
        yield f"{kind:<8} {each.framework} {each.path}: {reason}"


def main() -> int:
    """Prints the table; see the text above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", default="", help="part of the framework or of the path")
    parser.add_argument("--show", action="store_true", help="print what is refused or wrong")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gpu", help="also print the verdicts on this GPU")
    options = parser.parse_args()
    sets: list[dict[str, Any]] = json.loads(options.examples.read_text(encoding="utf-8"))
    scores = []
    for each in sets:
        name = each["what"].split()[0]
        if name not in _SETS:
            continue
        folder, values = _SETS[name]
        for path in each["paths"]:
            if options.only in name or options.only in path:
                scores.append(score(name, path.removeprefix(f"{folder}/"), options.checkouts / folder, values, gpu=options.gpu))
    print("\n".join([*_table(scores), *(_verdicts(scores) if options.gpu else ()), *(_details(scores) if options.show else ())]))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in scores], indent=1), encoding="utf-8")
    return int(any(each.wrong for each in scores))


if __name__ == "__main__":
    sys.exit(main())
