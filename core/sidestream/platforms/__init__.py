"""Accelerators: the hooks that a plugin implements, and how one is chosen."""
