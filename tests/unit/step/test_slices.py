"""What a model's own plan for tensor parallelism is taken for."""

from types import SimpleNamespace

from hpc_tune.step.slices import read_tp_plan, slicing_problems


def config(**plan):
    return SimpleNamespace(
        base_model_tp_plan={"layers.*.mlp.up_proj": "colwise", **plan},
        model_type="llama",
        num_attention_heads=4,
        intermediate_size=8,
    )


def test_an_embedding_that_is_tied_to_the_head_stays_whole():
    """As transformers 5.17 has it in its plan, which others do not."""
    tied = config(embed_tokens="embedding_rowwise")
    assert read_tp_plan(tied) == read_tp_plan(config())
    assert slicing_problems(tied, 2) == []


def test_a_plan_with_a_style_that_is_not_known_is_none():
    (problem,) = slicing_problems(config(**{"layers.*.mlp.other": "embedding_rowwise"}), 2)
    assert "transformers has no plan for splitting a llama model" in problem
