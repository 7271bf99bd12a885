# shellcheck shell=sh disable=SC3028,SC1090
# The launchers of a batch script that `slurmft sbatch` has submitted: sourced at its beginning, and by each bash script
# that it calls (BASH_ENV). Functions first, a folder in PATH second: an activated environment puts its own torchrun in
# front of PATH, but not in front of a function. Any POSIX shell can read this.

if [ -n "${slurmft_is_batch_script:-}" ]; then
    unset slurmft_is_batch_script
    if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
        SLURMFT_BATCH_JOB=$SLURM_JOB_ID
        SLURMFT_SCRIPT=$0
        SLURMFT_BASH_ENV=${BASH_ENV:-}
        BASH_ENV=$SLURMFT_LAUNCHERS/functions.sh
        PATH=$SLURMFT_LAUNCHERS/bin:$PATH
        export SLURMFT_BATCH_JOB SLURMFT_SCRIPT SLURMFT_BASH_ENV BASH_ENV PATH
        export SLURMFT_LAUNCHERS SLURMFT_PYTHON SLURMFT_SIGNAL SLURMFT_SET SLURMFT_AGAIN
        # a trap of the script's own takes its place, and this word is not said
        trap 'slurmft_last_word' EXIT
    fi
elif [ -n "${SLURMFT_BASH_ENV:-}" ] && [ -r "$SLURMFT_BASH_ENV" ]; then
    . "$SLURMFT_BASH_ENV"
fi

slurmft_last_word() {
    "$SLURMFT_PYTHON" -E -P -m slurmft launch --last-word || :
}

# What $! names behind & is a subshell, not the launcher: it passes signals on, as `kill -USR1 $!` means the training.
slurmft_meet() {
    slurmft_name=$1
    shift
    slurmft_code=0
    if [ "${BASHPID:-$(exec sh -c 'echo $PPID')}" = "$$" ]; then
        SLURMFT=${SLURMFT:-} SLURMFT_LINE=$slurmft_line SLURMFT_SOURCE=$0 \
            "$SLURMFT_PYTHON" -E -P -m slurmft launch "$slurmft_name" "$@" || slurmft_code=$?
    else
        {
            SLURMFT=${SLURMFT:-} SLURMFT_LINE=$slurmft_line SLURMFT_SOURCE=$0 \
                "$SLURMFT_PYTHON" -E -P -m slurmft launch "$slurmft_name" "$@" <&3 3<&- &
        } 3<&0
        slurmft_child=$!
        for slurmft_signal in HUP INT TERM USR1 USR2; do
            # shellcheck disable=SC2064
            trap "kill -$slurmft_signal $slurmft_child 2> /dev/null" "$slurmft_signal"
        done
        wait "$slurmft_child" || slurmft_code=$?
        while kill -0 "$slurmft_child" 2> /dev/null; do
            slurmft_code=0
            wait "$slurmft_child" || slurmft_code=$?
        done
        trap - HUP INT TERM USR1 USR2
    fi
    {
        case $slurmft_options in *x*) set -x ;; esac
        return "$slurmft_code"
    } 2> /dev/null
}

if [ "${SLURMFT_BATCH_JOB:-none}" = "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
    srun() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet srun "$@" || { return; } 2> /dev/null; }
    torchrun() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet torchrun "$@" || { return; } 2> /dev/null; }
    ft_launcher() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet ft_launcher "$@" || { return; } 2> /dev/null; }
    accelerate() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet accelerate "$@" || { return; } 2> /dev/null; }
    deepspeed() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet deepspeed "$@" || { return; } 2> /dev/null; }
    mpirun() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet mpirun "$@" || { return; } 2> /dev/null; }
    uv() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet uv "$@" || { return; } 2> /dev/null; }
    sbatch() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_meet sbatch "$@" || { return; } 2> /dev/null; }
    # of these only what launches, or is marked, is looked at: a script may call python a thousand times
    python() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_python python "$@" || { return; } 2> /dev/null; }
    python3() { { slurmft_line=${BASH_LINENO:-0} slurmft_options=$-; set +x; } 2> /dev/null; slurmft_python python3 "$@" || { return; } 2> /dev/null; }
fi

slurmft_python() {
    case "${SLURMFT:-} $*" in
        train\ * | *torch.distributed.run* | *torch.distributed.launch* | *accelerate.commands.launch* | *deepspeed.launcher.*)
            slurmft_meet "$@"
            ;;
        *)
            if [ "$slurmft_line" -gt 1 ] && grep -qs '#SLURMFT' "$0"; then
                slurmft_meet "$@"
            else
                slurmft_code=0
                command "$@" || slurmft_code=$?
                {
                    case $slurmft_options in *x*) set -x ;; esac
                    return "$slurmft_code"
                } 2> /dev/null
            fi
            ;;
    esac
}
