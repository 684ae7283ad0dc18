"""The options of a layout, added to the command line of a launch, give the job that the search has evaluated."""

from __future__ import annotations

import pickle
import random
import shlex
from dataclasses import replace
from typing import Any

import pytest

from analyzer.api import problem_of, read_launch
from analyzer.layout_search.command_line import command_line
from analyzer.layout_search.dimensions import space_of
from analyzer.layout_search.options import as_text, by_flag
from analyzer.layout_search.problem import Jobs
from analyzer.layout_search.split_jobs import changed_options, job_of_layout, layout_changes
from analyzer.specs import TrainingJob
from tests.fuzz.strategies import phrases
from tests.layout_search.every_layout import Every, Exact
from tests.layout_search.random_spaces import NOWHERE

LAUNCH = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --bf16 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 9999 "
    "--info-gpu H100-80GB --micro-batch-size 1 "
)
MOST = 4
"""Layouts of a space that are looked at."""


def without(words: list[str], flag: str) -> list[str]:
    """The words without an option and its operands. It must be there."""
    assert flag in words, (flag, words)
    found: list[str] = []
    removed = False
    for word in words:
        removed = word == flag or (removed and not word.startswith("--"))
        found += [] if removed else [word]
    return found


def applied(words: list[str], options: dict[str, object]) -> list[str]:
    """A command line with changed options, as the text of the options asks for it."""
    text = as_text(options)
    added, *removed = text.split("(without ")
    for flag in removed:
        words = without(words, flag.strip().removesuffix(")"))
    return [*words, *added.split()]


def of_command_line(words: list[str]) -> TrainingJob:
    """The job of a command line, without the texts about it."""
    return without_texts(read_launch(words, environ={}, folder=NOWHERE).job)


def without_texts(job: TrainingJob) -> TrainingJob:
    return replace(job, assumptions=(), warnings=(), unknown=())


def chosen(every: Every) -> list[Exact]:
    """Some layouts of a space."""
    return random.Random(str(every.case)).sample(every.layouts, min(MOST, len(every.layouts)))


def test_options_give_the_job_of_the_layout(every: Every) -> None:
    for each in chosen(every):
        words = applied(list(every.case.words), each.evaluation.options)
        assert of_command_line(words) == without_texts(each.job), each.evaluation.options


def test_the_command_to_paste_starts_the_layout(every: Every) -> None:
    arguments = every.space.problem.arguments
    words = every.case.words
    of_program = [word for phrase in phrases(list(words)) if phrase[0].startswith("--info") for word in phrase]
    for each in chosen(every):
        line = shlex.split(command_line(words, arguments, each.evaluation.options))
        assert line[0] == "torchrun"
        assert of_command_line([*line[1:], *of_program]) == without_texts(each.job), each.evaluation.options


def test_the_launch_itself_has_no_changes(every: Every) -> None:
    given = every.space.given
    assert layout_changes(every.space, given) == {}
    same = [each for each in every.layouts if each.layout == given]
    assert [without_texts(each.job) for each in same] == [of_command_line(list(every.case.words))]


def options_of(line: str, over: tuple[str, ...], **sizes: Any) -> dict[str, object]:
    """The options of the layout of a launch with other values of its split, stages or recomputation."""
    space = space_of(problem_of(read_launch((LAUNCH + line).split(), environ={}, folder=NOWHERE)), over=over)
    given = space.given
    layout = given._replace(
        split=given.split._replace(**{name: value for name, value in sizes.items() if name in given.split._fields}),
        stages=next(
            (
                each
                for each in space.stages(given.split)
                if sizes.keys() & {"pipeline", "virtual", "first", "last"}
                and all(getattr(each, name) == value for name, value in sizes.items() if name in each._fields)
            ),
            given.stages,
        ),
    )
    assert job_of_layout(space, layout) is not None
    return changed_options(space, layout)


def test_a_global_batch_size_that_the_launch_leaves_out_is_named() -> None:
    assert options_of("", ("tp",), tensor=2, sequence=True, expert_tensor=2) == {
        "--tensor-model-parallel-size": 2,
        "--sequence-parallel": True,
        "--global-batch-size": 8,
    }


def test_an_option_without_its_feature_is_left_out() -> None:
    line = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --global-batch-size 16"
    assert options_of(line, ("tp",), tensor=1, sequence=False, expert_tensor=1) == {
        "--tensor-model-parallel-size": 1,
        "--tp-comm-overlap": False,
    }


def test_an_even_distribution_leaves_out_the_options_of_the_launch() -> None:
    line = "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --global-batch-size 16"
    assert options_of(line, ("layers",), pipeline=2, first=None, given=False) == {"--decoder-first-pipeline-num-layers": None}


def test_other_virtual_stages_replace_the_option_of_the_launch() -> None:
    line = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 16"
    assert options_of(line, ("vpp",), pipeline=2, virtual=4, given=False) == {
        "--num-virtual-stages-per-pipeline-rank": 4,
        "--num-layers-per-virtual-pipeline-stage": None,
    }


def test_an_option_is_left_out_as_it_is_spelled() -> None:
    assert by_flag({"fp8": None}, read_launch((LAUNCH + "--fp8-format hybrid").split(), environ={}, folder=NOWHERE).arguments) == {
        "--fp8-format": None
    }


def test_text_of_options() -> None:
    options = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True, "--tp-comm-overlap": False, "--modules": ["a", "b"]}
    assert as_text(options) == "--tensor-model-parallel-size 2 --sequence-parallel --modules a b (without --tp-comm-overlap)"


def test_the_job_of_a_layout_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(read_launch(f"{LAUNCH} --global-batch-size 16".split(), environ={}, folder=NOWHERE))
    jobs = Jobs(problem)
    derived: list[TrainingJob] = []

    def build(*_: object, **__: object) -> TrainingJob:
        derived.append(problem.given)
        return problem.given

    monkeypatch.setattr("analyzer.layout_search.problem.build", build)
    changes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert jobs.of(changes) is jobs.of(dict(reversed(changes.items()))) is problem.given
    assert len(derived) == 1
    copied = pickle.loads(pickle.dumps(jobs))
    assert copied.of(changes) == problem.given
    assert len(derived) == 2
    assert jobs.of({"no_such_option": 1}) is None
