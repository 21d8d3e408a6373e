"""Imported by the warm process: ending process groups takes for ever, as NCCL's does while other ranks wait for this one."""

import time

import torch.distributed as dist

dist.destroy_process_group = lambda *_: time.sleep(600)
