"""Adapters that make models of other libraries into pipelines for a worker."""
