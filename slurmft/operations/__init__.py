"""Operations from outside of a job, by hand or from cron: status, rescue, sweep, doctor, drill."""
