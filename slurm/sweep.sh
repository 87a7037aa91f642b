#!/bin/bash
# The same run with several values of one setting, one array task for each (docs/sweeps.md):
#     sbatch slurm/sweep.sh [key=value ...]
#     HPC_TUNE_SWEEP=tune.rank HPC_TUNE_VALUES="8 64" sbatch --array=0-1 slurm/sweep.sh
#     python -m hpc_tune report runs/sweep-JOB/* --out sweep.html
#
# --- adapt these to your site (see sinfo, sacctmgr show assoc user=$USER) ---
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
# The plan takes 15 GiB of this; the rest is for copies that saves make and for the page cache.
#SBATCH --mem=64G
#SBATCH --time=04:00:00
# --- these let a run survive its time limit, preemption and the loss of a node ---
#SBATCH --job-name=hpc_tune-sweep
#SBATCH --output=%x-%A_%a.out
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
setting=${HPC_TUNE_SWEEP:-optim.lr}
read -ra values <<< "${HPC_TUNE_VALUES:-5e-5 1e-4 2e-4 4e-4}"
value=${values[${SLURM_ARRAY_TASK_ID:?it is a job array}]:?the array has more tasks than values}
if [ "$SLURM_ARRAY_TASK_COUNT" -lt ${#values[@]} ]; then
    echo "$SLURM_ARRAY_TASK_COUNT tasks for ${#values[@]} values of $setting: not all are tried"
fi

# Each task restarts its ranks after a stop for memory, requeues itself when its time ends, and
# gives up after two crashes at the same step.
exec python -m hpc_tune supervise --launch "$launch" --config configs/llama3_8b_lora.yaml \
    run.dir="runs/sweep-$SLURM_ARRAY_JOB_ID/${setting##*.}-$value" "$setting=$value" "$@"
