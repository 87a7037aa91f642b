#!/bin/bash
# LoRA on Llama 3.1 70B, 2 nodes of 8 GPUs:  sbatch slurm/70b_lora.sh [key=value ...]
#
# --- what a site may want otherwise (see sinfo, sacctmgr show assoc user=$USER) ---
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
# A plan takes 16 GiB of it. A node's ranks read 132 GiB of weights, whose pages count too and are
# there for the next start; the rest is for copies of saves and what NCCL shares.
#SBATCH --mem=192G
#SBATCH --time=12:00:00
# --- what makes a run survive its time limit, preemption and the loss of a node ---
#SBATCH --job-name=hpc_tune-70b
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@300
set -eo pipefail
cd "${SLURM_SUBMIT_DIR:?submit it with sbatch}"
: "${SCRATCH:?set it: the config names models, data and runs by it}"

# module load python openmpi                  # the site's names
source "${HPC_TUNE_VENV:-.venv}/bin/activate"  # where hpc_tune is installed, on a shared folder
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not know otherwise
export SLURM_EXPORT_ENV=ALL  # --export=NONE would keep all of this from the ranks
launch=${HPC_TUNE_LAUNCH:-srun --kill-on-bad-exit=1}  # or: "mpirun -np $SLURM_NTASKS"

# It starts the ranks again after a stop for memory, requeues the job when its time ends, and gives
# up what crashes twice at the same step. What it did is in RUN/starts.jsonl.
exec python -m hpc_tune supervise --launch "$launch" --config configs/llama3_70b_lora.yaml "$@"
