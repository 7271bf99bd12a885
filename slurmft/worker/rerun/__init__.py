"""The re-run state machine: a result that looks wrong is computed again, here and on other hardware."""
