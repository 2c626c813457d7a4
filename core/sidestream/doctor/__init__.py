"""What of this machine sidestream can use, and why it can't use the rest: ``sidestream doctor``.

Whatever belongs to a vendor is looked at in child processes with a time limit: a package that
aborts, exits or hangs at import is a finding here and not the end of the examination.
"""
