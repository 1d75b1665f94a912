#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=/shared/project/.ngym/submit/small/%j.log
#SBATCH --no-requeue
set -euo pipefail
cd /shared/project
logs=/shared/project/.ngym/submit/small
# The next job of the chain starts after each job that does not end with 0. It is cancelled with the rest of the chain,
# unless this one was cut, killed (128 and more), or ended with 75: "try again later".
continues=
end_chain() {
    local code=$?
    if [ -z "$continues" ] && [ "$code" -ne 75 ] && [ "$code" -lt 128 ]; then
        echo "the command ended with code $code, not by the time limit: the pending jobs of small are cancelled"
        scancel --user="$(id -un)" --name=small --state=PENDING || true
    fi
}
trap end_chain EXIT
# (no setup)
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$logs/ray_token
(umask 077 && [ -s "$RAY_AUTH_TOKEN_PATH" ] || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")

# Ray: the head on this node, then a worker on each other node. The command waits until the cluster has room for it.
head=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
export RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID RAY_ADDRESS=$head:$((20000 + SLURM_JOB_ID % 10000))
start=(ray start --num-cpus=8 --num-gpus=0 --disable-usage-stats --block)
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
trap 'end_chain; end_ray' EXIT
"${start[@]}" --head --node-ip-address="$head" --port="${RAY_ADDRESS#*:}" --include-dashboard=false &> "$logs/ray.log" &
until ray health-check --address "$RAY_ADDRESS" &> /dev/null; do kill -0 $! || exit 1; done
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$SLURMD_NODENAME" \
        --cpus-per-task=8 --output=/shared/project/.ngym/submit/small/%j-%N.log \
        bash -c '"$@" & trap "kill $!" TERM; wait; wait; rm -rf "$RAY_TMPDIR"' ray "${start[@]}" --address="$RAY_ADDRESS" &
    workers=$! # step 0 of the job
fi

# The run continues if an earlier job of this name has begun it.
command=(ng_run --on ray)
if "${command[@]}" --resume --dry-run > /dev/null 2>&1; then command+=(--resume); fi
"${command[@]}" &
run=$!
cut=
trap 'cut=yes; kill -TERM "$run"' USR1 # 180 s before the limit: end
trap 'kill -TERM "$run"' TERM
while kill -0 "$run" 2> /dev/null; do wait "$run" || true; done # a signal ends `wait`, too
code=0
wait "$run" || code=$?
if [ -n "$cut" ] && [ "$code" -ne 0 ]; then
    continues=yes; echo "cut by the time limit; the next job of the chain continues"
fi
exit "$code"
