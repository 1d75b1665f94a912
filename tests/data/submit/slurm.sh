#!/bin/bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --mem=400G
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --partition=h100
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=/shared/project/.ngym/submit/grpo/%j.log
#SBATCH --requeue
set -euo pipefail
cd /shared/project
logs=/shared/project/.ngym/submit/grpo
source /shared/ngym/.venv/bin/activate
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/ray_token
(umask 077 && [ -s "$RAY_AUTH_TOKEN_PATH" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")

# Ray: the head on this node, then a worker on each other node. The command waits until the cluster has room for it.
head=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID RAY_ADDRESS=$head:$((20000 + SLURM_JOB_ID % 10000))
start=(ray start --num-cpus=64 --num-gpus=8 --resources='{"h100": 1}' --disable-usage-stats --block)
workers=
end_ray() { # on the other nodes first, which remove their own folders
    if [ -n "$workers" ]; then
        scancel --signal=TERM "$SLURM_JOB_ID.0" &> /dev/null || true # its exit code says nothing: 225 after success
        for _ in {1..30}; do kill -0 "$workers" 2> /dev/null || break; sleep 1; done
    fi
    kill $(jobs -p) 2> /dev/null || true
    wait
    rm -rf "$RAY_TMPDIR"
}
trap 'end_ray' EXIT
"${start[@]}" --head --node-ip-address="$head" --port="${RAY_ADDRESS#*:}" --include-dashboard=false &> "$logs/ray.log" &
until ray health-check --address "$RAY_ADDRESS" &> /dev/null; do kill -0 $! || exit 1; done
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$SLURMD_NODENAME" \
        --cpus-per-task=64 --output=/shared/project/.ngym/submit/grpo/%j-%N.log \
        bash -c '"$@" & trap "kill $!" TERM; wait; wait; rm -rf "$RAY_TMPDIR"' ray "${start[@]}" --address="$RAY_ADDRESS" &
    workers=$! # step 0 of the job
fi

# The run continues if an earlier job of this name has begun it.
command=(ng_train --on ray grpo.yaml engine.zero_stage=2)
if "${command[@]}" --resume --dry-run > /dev/null 2>&1; then command+=(--resume); fi
"${command[@]}" &
run=$!
cut=
trap 'cut=yes; kill -USR1 "$run"' USR1 # 180 s before the limit: write a checkpoint and end
trap 'kill -TERM "$run"' TERM
while kill -0 "$run" 2> /dev/null; do wait "$run" || true; done # a signal ends `wait`, too
code=0
wait "$run" || code=$?
if [ -n "$cut" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
