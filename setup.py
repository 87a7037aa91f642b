"""Metadata, dependencies and the console script of hpc_tune."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = next(
    line.split('"')[1]
    for line in (here / "hpc_tune" / "__init__.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)

setup(
    name="hpc_tune",
    version=version,
    description="Fine-tune large language models on HPC clusters",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["hpc_tune", "hpc_tune.*"]),
    package_data={
        "hpc_tune": ["shapes/*/config.json", "chat_templates/*.jinja"],
        "hpc_tune.config": ["*.yaml"],
    },
    install_requires=[
        "deepspeed>=0.19.8",
        "h5py>=3.10",
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "mpi4py>=4.1",
        "numpy>=1.26",
        "nvidia-ml-py>=12.535.77",
        "omegaconf>=2.3",
        "peft>=0.20",
        "psutil>=5.9",
        "pyarrow>=20",
        "pydantic>=2.7",
        "pyyaml>=6.0",
        "rich>=13",
        "safetensors>=0.8",
        "tensorboard>=2.16.2",
        "torch>=2.9",
        "transformers>=5.17,<6",
    ],
    extras_require={
        "adamw8bit": ["torchao>=0.10"],
        "demo": ["gguf>=0.10"],
        "float8": ["torchao>=0.10"],
        "qlora": ["bitsandbytes>=0.45"],
        "gguf": ["gguf>=0.10"],
        "mlflow": ["mlflow-skinny>=3"],
        "trackio": ["trackio>=0.43"],
        "wandb": ["wandb>=0.31"],
        "test": [
            "accelerate>=1.1",
            "bitsandbytes>=0.45",
            "datasets>=3",
            "gguf>=0.10",
            "hypothesis>=6.100",
            "mypy>=1.14",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "setuptools>=70.1",
            "torchao>=0.10",
            "types-PyYAML>=6",
            "wandb>=0.31",
        ],
    },
    entry_points={"console_scripts": ["hpc_tune=hpc_tune.__main__:main"]},
)
