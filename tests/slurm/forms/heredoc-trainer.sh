#!/bin/bash
#SBATCH -N1
srun python - <<'PY'
print("from standard input")
PY
