"""Few threads: the tests run two at a time."""

import torch

torch.set_num_threads(1)
