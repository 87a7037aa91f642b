# SPDX-License-Identifier: Apache-2.0

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcTune(PythonPackage):
    """Fine-tunes large language models on HPC clusters. mpirun or Slurm starts the ranks."""

    # The project has no page yet: put in the address that you got the sources from.
    homepage = "https://example.org/hpc_tune"
    git = "https://example.org/hpc_tune.git"

    license("Apache-2.0")

    version("main", branch="main")

    variant("mpi", default=True, description="Start ranks with mpirun; srun needs no MPI")
    variant("cuda", default=False, description="Read NVIDIA GPUs in the doctor")

    with default_args(type="build"):
        depends_on("py-setuptools@68:")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-torch@2.9: +distributed")
        depends_on("py-transformers@5.17:5")
        depends_on("py-peft@0.20:")
        depends_on("py-safetensors@0.8:")
        depends_on("py-omegaconf@2.3:")
        depends_on("py-pydantic@2.7:")
        depends_on("py-pyyaml@6.0:")
        depends_on("py-pyarrow@20:")
        depends_on("py-h5py@3.10:")
        depends_on("py-numpy@1.26:")
        depends_on("py-jinja2@3.1:")
        depends_on("py-psutil@5.9:")
        depends_on("py-rich@13:")
        depends_on("py-matplotlib@3.8:")
        depends_on("py-tensorboard@2.16.2:")
        depends_on("py-mpi4py@4.1:", when="+mpi")
        depends_on("py-nvidia-ml-py@12.535.77:", when="+cuda")
        # A build of torch is for the GPUs of one vendor.
        depends_on("py-torch +cuda +nccl", when="+cuda")

    def patch(self):
        # Drop optional requirements, or pip looks for them: only ZeRO and NVMe need DeepSpeed.
        filter_file(r'^\s*"(deepspeed|mpi4py|nvidia-ml-py)>=.*\n', "", "setup.py")
