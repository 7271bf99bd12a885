"""The names of a journal's events. What each means and carries stands in ``docs/reference/events.md``, once."""

from __future__ import annotations

from enum import StrEnum


class EventName(StrEnum):
    """What happened. The words are part of the journal's format: they stay; a newer slurmft may write further ones."""

    # submission and start
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    SUBMISSION_FAILED = "submission failed"
    ATTEMPT_STARTED = "attempt started"
    ALREADY_FINISHED = "already finished"
    SUPERFLUOUS_START = "superfluous start"
    AGENTS_READY = "agents ready"
    WORKERS_STARTED = "workers started"
    FIRST_STEP = "first step"
    JOINING = "joining"
    STALE_REQUEST_DROPPED = "dropped a stale request"
    WAS_SUSPENDED = "was suspended"

    # nodes of an attempt
    AGENT_LOST = "agent lost"
    AGENT_LEFT = "agent left"
    AGENT_BACK = "agent back"
    AGENTS_GONE = "agents gone"
    NODE_KEPT = "node kept"
    NODE_GIVEN_BACK = "node given back"
    NODE_TAKEN_BACK = "node taken back"
    WILL_GROW = "will grow"
    SHRUNK = "shrunk"
    NOT_SHRUNK = "not shrunk"
    NOTICE = "notice"
    CONTAINER_LIMIT = "container limit"

    # failures
    WORKER_FAILED = "worker failed"
    WORKER_HUNG = "worker hung"
    KILLING_WORKERS = "killing workers"
    LAST_LOOK = "last look"
    STATE_KEPT = "state kept just in time"
    EVIDENCE = "evidence"
    STRAGGLER_SUSPECTED = "straggler suspected"
    STRAGGLER_DETECTED = "straggler detected"
    STRAGGLER_JUDGED = "straggler judged"
    STRAGGLER_KEPT = "straggler kept"
    SUPERVISOR_LOST = "supervisor lost"
    FAULT_INJECTED = "fault injected"
    FAULT_NOT_INJECTED = "fault not injected"

    # saves
    SAVE_REQUESTED = "save requested"
    SAVE_FAILED = "save failed"
    SAVES_KEEP_FAILING = "saves keep failing"
    SAVES_WORK_AGAIN = "saves work again"
    CHECKPOINT_TRIED = "checkpoint tried"
    CHECKPOINT_QUARANTINED = "checkpoint quarantined"
    CHECKPOINTS_REMOVED = "checkpoints removed"
    BATCH_REDUCED = "batch reduced"
    BATCH_NOT_REDUCED = "batch not reduced"

    # stops
    STOP_ASKED_FOR = "stop asked for"
    STOP_REQUESTED = "stop requested"
    STOP_AGREED = "stop agreed"
    STOP_SAVED = "stop saved"
    STOP_OVERDUE = "stop overdue"
    STOP_WITHOUT_A_SAVE = "stop without a save"
    WILL_NOT_CONTINUE = "will not continue"
    ENDED_FROM_OUTSIDE = "ended from outside"
    CANCELLED = "cancelled"

    # what follows
    VERDICT = "verdict"
    DECISION = "decision"
    SUPERSEDED = "superseded"
    REQUEUEING = "requeueing"
    REQUEUED = "requeued"
    REQUEUE_FAILED = "requeue failed"
    REQUEUE_SKIPPED = "requeue skipped"
    SWITCHING_REQUEUE_OFF = "switching requeue off"
    REQUEUE_STAYS_ON = "requeue stays on"
    REQUEUED_MEANWHILE = "requeued meanwhile"
    LEFT_TO_SLURM = "left to slurm"
    PLACED = "placed"
    BEGIN_NOW = "begin now"
    RESUBMITTING = "resubmitting"
    RESUBMITTED = "resubmitted"
    RESUBMIT_FAILED = "resubmit failed"
    STARTING_ANEW = "starting anew"
    NOT_CONTINUED = "not continued"
    CLAIM_OVERRULED = "claim overruled"
    RESCUING = "rescuing"
    RELEASED = "released"

    # placement
    AVOIDING = "avoiding"
    AVOIDING_GPUS = "avoiding_gpus"
    KEEPING_OFF = "keeping off"
    INCONCLUSIVE = "inconclusive"
    EXCLUSION_ESCAPED = "exclusion_escaped"
    EXCLUSIONS_REFUSED = "exclusions refused"
    EXCLUSIONS_DROPPED = "exclusions dropped"

    # inference
    REQUESTS_OPENED = "requests opened"
    NODE_ANSWERS = "node answers"
    REPLICA_READY = "replica ready"
    REPLICA_DIED = "replica died"
    REPLICA_DOWN = "replica down"
    REPLICA_SMALLER = "replica smaller"
    REQUEST_GIVEN_UP = "request given up"
    ANSWERS_UNREADABLE = "answers unreadable"
    OUTPUT_WRITTEN = "output written"
