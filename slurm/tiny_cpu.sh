#!/bin/bash
# A tiny model on CPUs, in minutes, on any cluster:  sbatch slurm/tiny_cpu.sh [key=value ...]
#
# --- adapt these to your site (see sinfo, sacctmgr show assoc user=$USER) ---
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --mem=3G
#SBATCH --time=00:20:00
# --- these let a run survive its time limit, preemption and the loss of a node ---
#SBATCH --job-name=hpc_tune-tiny
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@120
set -eo pipefail
cd "${SLURM_SUBMIT_DIR:?submit it with sbatch}"

# module load python openmpi                  # your site's names
source "${HPC_TUNE_VENV:-.venv}/bin/activate"  # where hpc_tune is installed, in a shared folder
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not inherit --cpus-per-task
export SLURM_EXPORT_ENV=ALL  # else --export=NONE hides all of this from the ranks
launch=${HPC_TUNE_LAUNCH:-srun --kill-on-bad-exit=1}  # or: "mpirun -np $SLURM_NTASKS"

# supervise restarts the ranks after a stop for memory, requeues the job when its time ends, and
# gives up after two crashes at the same step. RUN/starts.jsonl records what it did.
exec python -m hpc_tune supervise --launch "$launch" \
    run.dir="runs/tiny-$SLURM_JOB_ID" run.device=cpu train.max_steps=200 \
    checkpoint.every_steps=20 "$@"
