"""The ``parallel`` part: how the model is spread over the ranks."""

from typing import Literal

from pydantic import Field

from hpc_tune.config.section import PositiveInt, Section


class ParallelConfig(Section):
    """How the model is spread: replicate x shard x tensor x pipeline is the world size."""

    layout: Literal["simple", "auto"] = Field(
        "simple",
        description="auto: links and a decoder block are measured at the start, and of all layouts "
        "that fit the one with the shortest predicted step is taken, also on fewer ranks if that "
        "is faster; axes that are set are kept. simple: unset axes follow from memory alone. "
        "'parallel: auto' says the same.",
    )

    engine: Literal["auto", "native", "deepspeed"] = Field(
        "auto",
        description="auto: DeepSpeed where zero_stage is set, else native PyTorch.",
    )
    replicate: PositiveInt | None = Field(
        None,
        description="Copies of the model that each train on their share of the rows. Unset: "
        "chosen.",
    )
    shard: PositiveInt | None = Field(
        None,
        description="Ranks over which one copy of the weights is split (FSDP2). Unset: chosen.",
    )
    tensor: PositiveInt | None = Field(
        None,
        description="Ranks over which each matrix product is split; it must divide the attention "
        "heads and the key-value heads. Two messages per block and direction: keep it inside a "
        "node. Unset: 1.",
    )
    pipeline: PositiveInt | None = Field(
        None,
        description="Ranks over which the decoder blocks are dealt. Only activations travel, so it "
        "suits slow links; give each rank several micro-batches per step. Unset: 1.",
    )
    stages_per_rank: PositiveInt = Field(
        1,
        description="Pipeline stages that each rank holds. 1: the 1F1B schedule "
        "(arXiv:1806.03377); more: interleaved 1F1B (arXiv:2104.04473), less idle time for more "
        "messages.",
    )
    reshard: Literal["auto", "block", "micro", "step"] = Field(
        "auto",
        description="How long gathered weights stay where shard > 1. block: freed after each "
        "block, gathered again in the backward pass; micro: kept until the micro-batch's backward "
        "pass is over; step: gathered once per optimizer step, and gradients reduced once. auto: "
        "step where a whole copy fits.",
    )
    blocks_per_unit: PositiveInt = Field(
        1, description="Decoder blocks that are gathered and freed together where shard > 1."
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="The dtype in which sharded gradients travel. bf16 halves the bytes and loses "
        "digits with many ranks.",
    )
    zero_stage: Literal[1, 2, 3] | None = Field(
        None,
        description="The DeepSpeed ZeRO stage (arXiv:1910.02054): 1 splits the optimizer state "
        "over all ranks, 2 the gradients too, 3 the weights too.",
    )
    offload_params: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="Where idle weights wait: cpu and nvme free device memory and cost a transfer "
        "in each pass. cpu is for the sharded weights of either engine (the native one takes their "
        "optimizer state along), nvme for zero_stage=3.",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none",
        description="Where optimizer state lives; cpu updates the weights on the host (zero_stage "
        "1 to 3), nvme too, with the state on disk (zero_stage=3).",
    )
    offload_path: str | None = Field(
        None,
        description="The folder for nvme, on a disk of the node itself; used by one job at a time.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="full: keep only each decoder block's input and compute the rest again in the "
        "backward pass, a third more flops for far less memory (arXiv:1604.06174); selective: keep "
        "the results of matrix products and attention too, and compute only the cheap rest again. "
        "The losses are the same bits.",
    )
