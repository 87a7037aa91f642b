#!/bin/bash
# LoRA on Llama 3.1 70B, 2 nodes of 8 GPUs:  sbatch slurm/70b_lora.sh [key=value ...]
#
# --- adapt these to your site (see sinfo, sacctmgr show assoc user=$USER) ---
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
# The plan takes 16 GiB of this. A node's ranks read 132 GiB of weights: their page cache counts
# too and serves the next start. The rest is for copies that saves make and NCCL's shared memory.
#SBATCH --mem=192G
#SBATCH --time=12:00:00
# --- these let a run survive its time limit, preemption and the loss of a node ---
#SBATCH --job-name=hpc_tune-70b
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@300
set -eo pipefail
cd "${SLURM_SUBMIT_DIR:?submit it with sbatch}"
: "${SCRATCH:?set it: the config names models, data and runs by it}"

# module load python openmpi                  # your site's names
source "${HPC_TUNE_VENV:-.venv}/bin/activate"  # where hpc_tune is installed, in a shared folder
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not inherit --cpus-per-task
export SLURM_EXPORT_ENV=ALL  # else --export=NONE hides all of this from the ranks
launch=${HPC_TUNE_LAUNCH:-srun --kill-on-bad-exit=1}  # or: "mpirun -np $SLURM_NTASKS"

# supervise restarts the ranks after a stop for memory, requeues the job when its time ends, and
# gives up after two crashes at the same step. RUN/starts.jsonl records what it did.
exec python -m hpc_tune supervise --launch "$launch" --config configs/llama3_70b_lora.yaml "$@"
