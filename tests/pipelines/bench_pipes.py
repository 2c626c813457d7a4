"""Pipelines that know how large their outputs are."""

from sidestream_pipes import Gradient


class SaysItsSize(Gradient):
    """Gradients of a size that the options name."""

    def output_nbytes(self, params):
        size = self.config.options["size"]
        return size if size < 0 else 3 * size * size * 4
