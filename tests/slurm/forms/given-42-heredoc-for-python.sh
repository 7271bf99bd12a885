#!/bin/bash
#SBATCH --nodes=1
python - <<'EOF'
import torch
print(torch.cuda.is_available())
EOF
srun python main.py
