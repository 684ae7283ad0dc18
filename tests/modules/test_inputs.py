"""The inputs of parts of a model have only the values that these parts depend on."""

from __future__ import annotations

import pickle

from analyzer.modules.inputs import module_inputs
from analyzer.modules.layer import LayerKind, one_layer
from tests.job_of import job_of

MOE = "--num-experts 8 --moe-layer-freq 2 --disable-bias-linear --expert-model-parallel-size"


def test_the_inputs_of_parts_lack_the_splits_of_others() -> None:
    split = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    inputs = module_inputs(job_of(f"{MOE} 4 {split}", gpus=16))
    fields = {"expert", "expert_tensor", "pipelined"}
    assert fields <= set(vars(inputs.split))
    assert fields & set(vars(inputs.of_dense_layers.split)) == set()
    assert fields & set(vars(inputs.of_attention.split)) == set()
    assert fields & set(vars(inputs.of_moe_layers.split)) == {"expert", "expert_tensor"}
    assert fields & set(vars(inputs.of_ends.split)) == {"pipelined"}
    assert inputs.of_ends.split.pipelined
    assert inputs.of_moe_layers.split.expert == 4
    assert {each.split.tensor for each in (inputs.of_dense_layers, inputs.of_moe_layers, inputs.of_ends)} == {2}


def test_jobs_that_differ_in_expert_parallelism_share_dense_layers_only() -> None:
    first, second = (module_inputs(job_of(f"{MOE} {size}")) for size in (2, 4))
    assert one_layer(first, LayerKind()) is one_layer(second, LayerKind())
    moe = LayerKind(moe=True)
    assert one_layer(first, moe) is not one_layer(second, moe)
    attention = [layer.children[0] for layer in (one_layer(first, moe), one_layer(second, moe))]
    assert attention[0] is attention[1]


def test_inputs_of_another_process_find_the_same_trees() -> None:
    """Keys of caches are compared by their values, and the hash is not that of an object."""
    inputs = module_inputs(job_of(f"{MOE} 2"))
    for each in (inputs, inputs.of_dense_layers, inputs.of_moe_layers, inputs.of_ends):
        again = pickle.loads(pickle.dumps(each))
        assert type(again) is type(each)
        assert again == each
        assert hash(again) == hash(each)
    assert inputs.of_dense_layers != inputs.of_moe_layers
