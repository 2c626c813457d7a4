"""Measure what moving outputs beside the forward is worth, each figure beside its bound.

The pipelines here are synthetic: forwards of a given length with outputs of a given size, whose
pixels can be checked. Nothing here is imported by the rest of the package.
"""
