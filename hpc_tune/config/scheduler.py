"""the ``slurm`` section of the configuration: what a job asks a cluster for."""

from typing import Annotated

from pydantic import Field

from hpc_tune.config.section import PositiveInt, Seconds, Section


class SlurmConfig(Section):
    """What ``submit`` asks Slurm for; a run itself uses none of it."""

    account: str | None = Field(None, description="The account that pays; unset: the user's own.")
    partition: str | None = Field(None, description="The partition; unset: the cluster's default.")
    qos: str | None = Field(None, description="The quality of service; unset: the default.")
    nodes: PositiveInt = Field(1, description="Nodes of the job.")
    gpus_per_node: Annotated[int, Field(ge=0)] = Field(
        0, description="GPUs of each node, one rank each; 0: ranks on CPUs."
    )
    tasks_per_node: PositiveInt | None = Field(
        None, description="Ranks of each node; unset: one per GPU, or one."
    )
    cpus_per_task: PositiveInt = Field(1, description="Cores of each rank.")
    memory: str | None = Field(
        None,
        description="Host memory of each node as Slurm writes it, such as 700G; plan tells how "
        "much. Unset: the partition's default, which can be small.",
    )
    time: str = Field(
        "01:00:00",
        description="The limit of one job as Slurm writes it; the run goes on in the next.",
    )
    leave_before: Seconds = Field(
        300.0,
        description="The time before that limit at which the run saves and leaves, to be queued "
        "again; longer where a save takes minutes.",
    )
    job_name: str = Field("hpc_tune", description="The name in the queue.")
    output: str = Field(
        "%x-%j.out", description="The file for what the job prints; Slurm fills in %x and %j."
    )
    modules: list[str] = Field([], description="Modules to load, such as [python, openmpi].")
    env_file: str | None = Field(None, description="A file of the shell to source, for the rest.")
    venv: str | None = Field(
        None, description="The virtual environment in which hpc_tune is installed, if any."
    )
    container: str = Field(
        "",
        description="What stands before python to run it in a container, such as "
        "'apptainer exec --nv image.sif'.",
    )
    launch: str = Field(
        "srun --kill-on-bad-exit=1",
        description="What starts the ranks: srun, or 'mpirun -np 16' where srun and the site's MPI "
        "do not know each other.",
    )
