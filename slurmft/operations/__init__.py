"""What people and cron do from outside of a job: status, rescue, sweep, doctor, drill."""
