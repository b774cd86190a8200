#!/usr/bin/env bash
# One node's launcher, which train.sbatch starts on each: node.sh RANKS [torchrun's options] -m …
#
# RANKS, as "0,9", are those of the job whose output is shown, each line after its rank. SLURM_NODEID
# counts nodes from 0, and node 0 has ranks 0 to NGPU - 1: torchrun's own order of nodes is that of
# their names, which is another one.
set -euo pipefail

IFS=, read -ra shown <<<"$1"
for place in "${!shown[@]}"; do # torchrun counts from the node's first; others are not there
    shown[place]=$((shown[place] - SLURM_NODEID * NGPU))
done
local_ranks="$(IFS=, && echo "${shown[*]}")"

# shellcheck disable=SC2016  # torchrun fills it in
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank${rank}]:'
# exec: a signal to this task is one to the launcher.
exec "$PY" -m torchtitan_dp.launch --node_rank="$SLURM_NODEID" --rdzv_backend=static \
    --local-ranks-filter="$local_ranks" --role rank --tee 3 "${@:2}"
