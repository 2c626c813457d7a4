"""Drive the four stages by hand, in the orders that a scheduler may choose."""

from __future__ import annotations


def step(pipeline, state) -> None:
    pipeline.step_scheduler(state, pipeline.denoise_step(state))


def run(pipeline, request):
    """Step one request from its first stage to its payload."""
    state = pipeline.prepare_encode(request)
    while not state.done:
        step(pipeline, state)
    return pipeline.post_decode(state)


def run_interleaved(pipeline, requests):
    """Step requests in turn; each begins a step after the one before, as if it had joined."""
    waiting = list(requests)
    states, payloads = [], {}
    while waiting or len(payloads) < len(states):
        if waiting:
            states.append(pipeline.prepare_encode(waiting.pop(0)))
        for index, state in enumerate(states):
            if not state.done:
                step(pipeline, state)
            elif index not in payloads:
                payloads[index] = pipeline.post_decode(state)
    return [payloads[index] for index in range(len(states))]
