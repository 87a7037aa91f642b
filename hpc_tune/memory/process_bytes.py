"""What the processes of a run take of host memory before any value of a model: the one table.

Bytes are the anonymous and shared ones of one process, as ``host.own_bytes`` counts them. Measured
on x86-64 with torch 2.13, transformers 5.23 and Python 3.11, unless a comment says otherwise.
"""

MIB = 1 << 20

# A rank that has imported torch, transformers and peft and connected gloo, without a model. It has
# prepared the data and tried the architecture too; the median of 6 shapes.
RANK_BYTES = 284 * MIB
# What comes to it. With a model: Python's objects for the modules and parameters, adapters included
# (Llama shapes), once and for each decoder block. With ZeRO: DeepSpeed.
MODEL_OBJECTS_BYTES, BLOCK_OBJECTS_BYTES = 20 * MIB, 900 * 1024
DEEPSPEED_BYTES = 45 * MIB
# With the first step on CPUs: the libraries' own buffers, Python's objects, and blocks of the sizes
# that rows of short documents have. Fitted to 3 shapes. And what of it stays when the heap is
# trimmed, before an evaluation and a save that training waits for: 2 to 14 MiB in 4 runs.
FIRST_STEP_BYTES, TRIMMED_STEP_BYTES = 32 * MIB, 12 * MIB
# With a GPU. Not measured, on the safe side.
GPU_RANK_BYTES = 1478 * MIB
# Less than this on a node for each of its ranks is worth a warning: their libraries, and a small
# model. Not measured.
MIN_RANK_BYTES = 1024 * MIB

# A process that merges, before it knows the model; and what comes to it with transformers, and its
# model without values: 113 to 140 MiB.
MERGE_BYTES, STOCK_MODEL_BYTES = 153 * MIB, 130 * MIB
# What other processes of hpc_tune take in all, with some to spare: a plan, and a report without its
# run's metrics.
PLAN_BYTES, REPORT_BYTES = 600 * MIB, 250 * MIB
# A worker of torch.compile: a Python with torch, and one run of the C++ or Triton compiler. Not
# measured.
COMPILE_WORKER_BYTES = 1024 * MIB
