"""The points of a save at which a fault can come, as ``checkpoint.write_requests`` knows them by name."""

WRITER_POINTS = (
    "request read",
    "folder made",
    "image begun",
    "image half written",
    "image written",
    "image synced",
    "image in place",
    "hashed",
    "receipt written",
)
"""On every rank's writer, in their order; ``hashed`` may come anywhere after the first."""

COMMIT_POINTS = ("receipts complete", "metadata written", "before marker", "marker written", "before pruning", "pruned")
"""On rank 0's writer, after those."""

STEP_COPY_POINTS = ("step hashed", "step sent")
"""On a writer that copies a step between two saves."""

STAGING_POINTS = ("announced", "slot emptied", "half staged", "staged", "index in place", "submitted")
"""In the worker."""
