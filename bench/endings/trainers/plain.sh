#!/bin/bash
# What people write: on the signal requeue this very job; the trainer saves every few steps. TRAINER, FOLDER and
# SAVE_EVERY are set where it is submitted.
set -u
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((15000 + SLURM_JOB_ID % 10000))
trap 'scontrol requeue "$SLURM_JOB_ID"' TERM
# shellcheck disable=SC2016
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec python "$0" "$1" "$2"' \
    "$TRAINER" "$FOLDER" "$SAVE_EVERY" &
wait
wait # the first one ends when the signal comes
