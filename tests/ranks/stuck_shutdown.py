"""Imported by the warm process of ranks that are told so (STUCK): ending process groups takes for ever, as NCCL's does
while other ranks wait for this
one. Whoever collects tests imports it too, and is told nothing."""

import os
import time

import torch.distributed as dist

STUCK, FOR_EVER = "MESHWRIGHT_TEST_STUCK", 600

if os.environ.get(STUCK):
    dist.destroy_process_group = lambda *_: time.sleep(FOR_EVER)
