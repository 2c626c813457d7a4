"""What holds for every test, and for every process that a test starts."""

import os

# torch reads it when it is imported; more threads than cores only make a suite of processes slow.
os.environ["OMP_NUM_THREADS"] = "1"
# What a test needs lies on the disk; a try to fetch it has to fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
