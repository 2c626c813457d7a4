"""The command ``sidestream``.

Modules here import nothing heavy at the top: ``sidestream --help`` and the shell's completion
answer without torch, numpy or Pillow.
"""
