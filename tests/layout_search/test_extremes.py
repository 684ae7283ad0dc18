"""Questions over all layouts: the answers are those of an enumeration of every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from analyzer.api import problem_of, read_launch
from analyzer.errors import AnalyzerError, InputError
from analyzer.layout_search.dimensions import space_of
from analyzer.layout_search.evaluation import Evaluation, evaluate
from analyzer.layout_search.executors import Workers
from analyzer.layout_search.extremes import Answers
from analyzer.layout_search.problem import Problem, with_changes
from analyzer.layout_search.related import largest, with_world
from analyzer.layout_search.split_jobs import job_of_layout
from analyzer.memory.ranks import rank_classes_unlimited
from analyzer.memory.verdict import highest
from analyzer.results import TrainingTime
from tests.layout_search.every_layout import layouts_of
from tests.layout_search.random_spaces import NOWHERE

WORDS = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 4096 --num-attention-heads 8 --seq-length 1024 --swiglu "
    "--max-position-embeddings 1024 --bf16 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 31999 "
    "--info-gpu H100-80GB --micro-batch-size 1 --global-batch-size 16 --info-gpu-memory"
)
OVER = ("tp", "pp", "recompute", "optimizer")


@cache
def problem(memory: str) -> Problem:
    return problem_of(read_launch([*WORDS.split(), memory], environ={}, folder=NOWHERE))


def answers(memory: str, *, days: float = 1.0) -> Answers:
    """The training takes `days` times 8 on one GPU, and less in proportion on more."""

    def trained(space: object, _: object) -> TrainingTime:
        gpus = space.problem.world.size  # type: ignore[attr-defined]
        of_iterations = 8 * days / gpus
        return TrainingTime(
            iterations=1, tokens=1, days=of_iterations, gpu_hours=1, training_days=of_iterations, evaluation_days=0,
            checkpoint_days=0, checkpoint_bytes=0, cost=None,
        )  # fmt: skip

    return Answers(problem(memory), Workers(), trained, over=OVER)


def least_bytes(changed: Problem) -> int:
    """The device memory of the layout with the least, of all that Megatron accepts."""
    found = []
    space = space_of(changed, over=OVER)
    for layout in layouts_of(space):
        job = job_of_layout(space, layout)
        try:
            if job is not None:
                found.append(highest(rank_classes_unlimited(job)).memory.device_bytes)
        except AnalyzerError:
            continue
    return min(found)


@cache
def least_on(gpus: int) -> int:
    return least_bytes(with_world(problem("80GiB"), gpus))


@pytest.mark.parametrize("gpus", [2, *(pytest.param(gpus, marks=pytest.mark.slow) for gpus in (1, 4))])
def test_the_smallest_number_of_gpus_is_that_of_all_layouts(gpus: int) -> None:
    needed = {number: least_on(number) for number in (1, 2, 4, 8)}
    memory = f"{needed[gpus] + 2**20}B"
    found = answers(memory).fewest_gpus()
    enough = [number for number, least in needed.items() if least <= needed[gpus] + 2**20]
    assert found.value == min(enough) == gpus
    assert found.layout is not None
    assert found.layout.device_bytes <= needed[gpus] + 2**20
    assert found.not_enough == (None if gpus == 1 else gpus // 2)


@pytest.mark.slow
def test_whole_nodes_between_two_powers_of_two_are_tried() -> None:
    """A training of 8 GPU-days needs 24 GPUs, or three nodes, to end within a third of a day."""
    three = problem_of(
        read_launch(
            [*WORDS.replace("--global-batch-size 16", "--global-batch-size 48").split(), "80GiB"], environ={}, folder=NOWHERE
        )
    )
    found = answers("80GiB")
    found._problem = three
    answer = found.fewest_gpus(days=0.34)
    assert (answer.value, answer.not_enough) == (24, 16)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_the_smallest_number_of_gpus_for_a_time_is_that_of_all_layouts(known: bool) -> None:
    """`known`: whether the number of iterations is, from which slow layouts are left out at once."""
    iterations = 1000
    fastest = {}
    for number in (1, 2, 4, 8):
        space = space_of(with_world(problem("80GiB"), number), over=OVER)
        jobs = [(layout, job_of_layout(space, layout)) for layout in layouts_of(space)]
        problem_ = space.problem
        found = [evaluate(layout, {}, job, problem_.speed, problem_.rates) for layout, job in jobs if job is not None]
        fastest[number] = min(each.iteration_seconds for each in found if each is not None)

    def trained(_: object, layout: Evaluation) -> TrainingTime:
        days = iterations * layout.iteration_seconds / 86_400
        return TrainingTime(
            iterations=1, tokens=1, days=days, gpu_hours=1, training_days=days, evaluation_days=0, checkpoint_days=0,
            checkpoint_bytes=0, cost=None,
        )  # fmt: skip

    asked = Answers(problem("80GiB"), Workers(), trained, over=OVER, iterations=iterations if known else 0)
    for number, seconds in fastest.items():
        answer = asked.fewest_gpus(days=1.0001 * iterations * seconds / 86_400)
        assert answer.value == min(each for each, time in fastest.items() if time <= 1.0001 * seconds) == number
        assert answer.layout is not None
        assert answer.layout.iteration_seconds == pytest.approx(seconds)


def test_a_limit_of_days_needs_the_length_of_the_training() -> None:
    with pytest.raises(InputError, match="--info-search-days"):
        Answers(problem("80GiB"), Workers(), lambda *_: None, over=OVER).fewest_gpus(days=1)


@pytest.mark.slow
def test_the_longest_sequence_is_that_of_all_layouts() -> None:
    """It fits in some layout, and the next longer one in none."""
    limit = 10 * 2**30
    found = answers(f"{limit}B").largest("seq-length")
    assert found.value is not None
    assert found.not_enough is not None
    for length, fits in ((found.value, True), (found.not_enough, False)):
        changes = {"seq_length": length, "max_position_embeddings": length, "create_attention_mask_in_dataloader": False}
        changed = replace(problem(f"{limit}B"), arguments=with_changes(problem(f"{limit}B").arguments, changes), runs=False)
        changed = replace(changed, given=changed.job({}))
        assert (least_bytes(changed) <= limit) is fits
    assert found.not_enough - found.value <= max(1024, found.value / 4)
    assert found.options == {
        "--seq-length": found.value, "--max-position-embeddings": found.value, "--no-create-attention-mask-in-dataloader": True,
    }  # fmt: skip


@pytest.mark.slow
def test_the_largest_micro_batch_is_that_of_all_layouts() -> None:
    limit = 10 * 2**30
    found = answers(f"{limit}B").largest("micro-batch-size")
    assert found.value is not None
    sizes = {}
    for size in (1, 2, 4, 8, 16):
        changed = replace(
            problem("80GiB"), arguments=with_changes(problem("80GiB").arguments, {"micro_batch_size": size}), runs=False
        )
        try:
            sizes[size] = least_bytes(replace(changed, given=changed.job({})))
        except AnalyzerError:  # more sequences than the data-parallel ranks of the given layout have
            arguments = with_changes(changed.arguments, {"tensor_model_parallel_size": 8})
            changed = replace(changed, arguments=arguments)
            sizes[size] = least_bytes(replace(changed, given=changed.job({})))
    assert found.value == max(size for size, least in sizes.items() if least <= limit)
    assert found.layout is not None
    assert found.layout.layout.split.micro_batch == found.value


def test_the_largest_micro_batch_may_need_more_tensor_parallelism_than_the_launch_has() -> None:
    """All 16 sequences in one microbatch leave one data-parallel rank, and the launch has 8."""
    asked = Answers(problem("80GiB"), Workers(), lambda *_: None, over=("tp", "pp", "micro-batch"))
    found = asked.largest("micro-batch-size")
    assert (found.value, found.not_enough) == (16, None)
    assert found.layout is not None
    split = found.layout.layout.split
    assert (split.micro_batch, split.tensor * found.layout.layout.stages.pipeline) == (16, 8)


@pytest.mark.slow
def test_the_longest_sequence_does_not_depend_on_the_micro_batch_of_the_launch() -> None:
    limit, found = "10GiB", []
    for size in ("1", "2"):
        words = WORDS.replace("--micro-batch-size 1", f"--micro-batch-size {size}").split()
        launch = problem_of(read_launch([*words, limit], environ={}, folder=NOWHERE))
        asked = Answers(launch, Workers(), lambda *_: None, over=("tp", "micro-batch", "optimizer"))
        found.append(asked.largest("seq-length").value)
    assert found[0] == found[1]


def test_other_numbers_of_gpus_keep_the_options_that_must_not_change() -> None:
    """32 data-parallel ranks have too few sequences, and two pipeline ranks would do."""
    changed = with_world(problem("80GiB"), 32, keep=("pipeline-model-parallel-size",))
    assert changed.given.parallel.pipeline == 1
    assert changed.given.parallel.data <= 16


def test_the_length_of_an_encoder_is_changed_where_the_launch_gives_it() -> None:
    words = (
        "--nproc-per-node 2 pretrain_t5.py --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 256 --num-attention-heads 4 "
        "--encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 2 "
        "--global-batch-size 4 --lr 1e-4 --train-iters 10 --vocab-size 1000 --tokenizer-type NullTokenizer "
        "--bf16 --info-gpu A100-40GB"
    )
    launch = problem_of(read_launch(words.split(), environ={}, folder=NOWHERE))
    found = largest(launch, "seq-length")
    assert found.value is not None
    assert found.value >= 512
