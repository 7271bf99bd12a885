-- For a site's tree of modules: slurmft/VERSION.lua. Users keep their own Python and torch; jobs find slurmft in PATH.
local root = "/opt/slurmft"

whatis("Name: slurmft")
whatis("Description: keeps training and inference going on Slurm")
help([[
slurmft quickstart     trains an example here, in about a minute
slurmft sbatch job.sh  submits a batch script as it is
slurmft --help         all verbs; man slurmft
]])

prepend_path("PATH", pathJoin(root, "bin"))
prepend_path("MANPATH", pathJoin(root, "share/man"))
