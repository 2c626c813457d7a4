"""Entry point of a worker process: ``python -m sidestream.worker FD...``."""

from __future__ import annotations

import sys

from sidestream.worker.process import main

if __name__ == "__main__":
    main(sys.argv[1:])
