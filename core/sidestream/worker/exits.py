"""Exit codes by which a worker tells why it ended."""

from __future__ import annotations

from typing import Final

#: An error that nobody waits for ended it; its traceback is on stderr.
EXIT_FAILED: Final = 1
#: It could not start, and said why.
EXIT_START_FAILED: Final = 70
#: Its device is lost.
EXIT_DEVICE_LOST: Final = 71
#: The ranks of its group did not end a forward alike.
EXIT_SPLIT: Final = 72
