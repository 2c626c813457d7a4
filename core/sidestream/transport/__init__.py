"""How payloads, frames and flags pass between the main process and its workers.

``packing`` takes a payload apart and rebuilds it. ``arena`` (worker) and ``lease`` (main process)
are the two ends of the shared memory that outputs travel in, ``channel`` carries the messages,
``control_page`` the flags and heartbeats that must not wait for a message.
"""
