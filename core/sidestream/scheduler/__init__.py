"""Decides what runs next; does no I/O."""
