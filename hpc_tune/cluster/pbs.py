"""PBS, which sets a job's id and leaves the rest to the job's script.

The script sets HPC_TUNE_JOB_END and names the command that requeues the job.
"""

from hpc_tune.cluster.protocol import Scheduler

PBS = Scheduler(job_id="PBS_JOBID", name="PBS")
