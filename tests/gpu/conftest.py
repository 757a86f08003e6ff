"""Where there is no GPU nothing of this folder is collected: no test is skipped or claims to hold.

Each test starts its ranks from scratch (about 10 s): CUDA does not survive a fork.
"""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
