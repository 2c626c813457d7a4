"""Owns the workers: sends them work, resolves who waits for it, notices when one dies."""
