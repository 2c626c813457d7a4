"""Where nothing runs beside the copy, bytes go straight to their place."""

from __future__ import annotations

import tracemalloc

from sidestream import DiffusionRequest, SamplingParams


def test_an_array_of_the_cpu_is_copied_once(make_engine):
    # In this process, where numpy says what it allocates; the output's own memory is torch's.
    engine = make_engine("bench_pipes:KeptArray", platform="cpu", executor="uniproc")
    requests = [DiffusionRequest("x", SamplingParams(seed=seed)) for seed in range(3)]
    engine.submit(requests[0]).result(30)
    tracemalloc.start()
    try:
        outputs = [engine.submit(request).result(30).output for request in requests]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < outputs[0].nbytes / 2
    assert [int(output[0, 0, 0]) for output in outputs] == [0, 1, 2]
