-- A site's plug-in: what it does with a job depends on the job's name.

function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.name == "without-charge-code" then
        slurm.log_user("Charge code is missing.\nhttps://hpc.example.org/charge tells how to get one.")
        return slurm.ERROR
    end
    if job_desc.name == "rewritten" then
        job_desc.partition = "low"
        job_desc.time_limit = 8
        job_desc.comment = "by the site JobState=CANCELLED Restarts=9 Requeue=0 PreemptTime=None"
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    if job_rec.name == "unchangeable" and modify_uid ~= 0 then
        slurm.log_user("Jobs are not changed here.")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

return slurm.SUCCESS
