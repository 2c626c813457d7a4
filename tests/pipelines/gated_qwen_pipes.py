"""Qwen-Image with a gate; apart from the other gated ones, since diffusers takes long to import."""

from __future__ import annotations

from abort_pipes import pause

from sidestream.models.qwen_image import QwenImage


class GatedQwenImage(QwenImage):
    """Qwen-Image with a gate before each word to its worker; the prompt is the gate's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.decoded = 0

    @property
    def on_step(self):
        return self._hook

    @on_step.setter
    def on_step(self, hook):
        self._hook = None if hook is None else lambda step: self._gated(hook, step)

    def _gated(self, hook, step):
        pause(self._prompt, step)
        hook(step)

    def forward(self, requests):
        self._prompt = requests[0].prompt
        return super().forward(requests)

    def _decode(self, latents, params):
        self.decoded += 1
        return super()._decode(latents, params)

    def count_decoded(self):
        return self.decoded
