"""Fine-tune large language models on HPC clusters."""

__version__ = "0.1.0"
