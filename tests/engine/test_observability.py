"""What an engine says of itself."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest

from sidestream import DiffusionRequest, SamplingParams, write_trace


def request(seed=0, height=64):
    return DiffusionRequest("x", SamplingParams(height=height, width=64, seed=seed))


def test_a_trace_has_a_span_for_each_stage_of_each_output(engines, tmp_path):
    engine = engines("Gradient", "sim")
    outputs = engine.generate([request(seed=i) for i in range(3)])
    write_trace(outputs, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    for output in outputs:
        own = [e for e in spans if e["name"] == output.request_id]
        assert [lanes[e["tid"]] for e in own] == list(dict.fromkeys(lanes.values()))
        (copy,) = [e for e in own if lanes[e["tid"]] == "copy"]
        assert copy["args"]["nbytes"] == output.output.nbytes
        share = output.timings.copy_hidden_share
        assert copy["args"]["copy_hidden_share"] == share
        assert 0.0 <= share <= 1.0
        assert copy["ts"] == pytest.approx(output.timings.copy_started_at * 1e6)
    for row in lanes:
        times = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row]
        # A viewer drops a span that overlaps the one before it.
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(times))


def test_an_engine_says_what_runs_beside_what(engines):
    engine = engines("Gradient", "sim")
    said = "mode: request; async output: on; pump: started; worker's output thread: started"
    assert said in engine.describe()
    assert engine.executor.collective_rpc("describe")[0]["output_thread"]
    assert {"sidestream-engine", "sidestream-pump"} <= {t.name for t in threading.enumerate()}


@pytest.mark.parametrize(
    ("platform", "executor", "carrier"),
    [("sim", "multiproc", "slot"), ("sim", "uniproc", "host"), ("cpu", "multiproc", "slot")],
)
def test_stats_count_how_outputs_travelled(engines, platform, executor, carrier):
    engine = engines("Gradient", platform, executor)
    before = engine.stats()["carriers"].get(carrier, 0)
    output = engine.submit(request()).result(30)
    assert output.timings.carrier == carrier
    assert engine.stats()["carriers"][carrier] == before + 1


def test_an_output_for_which_the_arenas_have_no_room_is_a_one_shot(engines):
    engine = engines("Gradient", host_buffer_bytes=0)
    before = engine.stats()["carriers"].get("one-shot", 0)
    assert engine.submit(request()).result(30).timings.carrier == "one-shot"
    assert engine.stats()["carriers"] == {"one-shot": before + 1}


def test_an_engine_says_that_it_waits_for_outputs_to_be_taken(engines):
    engine = engines("Gradient", host_buffer_bytes=0)
    handles = [engine.submit(request(seed=i)) for i in range(10)]
    assert handles[0].output_ready.result(30) is None
    deadline = time.monotonic() + 60
    while "ready and not taken (host_buffer_bytes=0)" not in engine.describe():
        assert time.monotonic() < deadline, engine.describe()
        time.sleep(0.01)
    assert [int(h.result(30).output[0, 0, 0]) for h in handles] == list(range(10))


def test_a_worker_says_which_slots_it_has_given_away(engines):
    engine = engines("Gradient")

    def slots():
        return engine.executor.collective_rpc("describe")[0]["slots"]

    first = engine.submit(request()).result(30)
    before = slots()
    assert before.slots_in_use >= 1
    assert before.arena_bytes >= first.output.nbytes
    held = [engine.submit(request(seed=i)).result(30) for i in range(3)]
    # More, maybe: what came back from others is taken in bit by bit.
    assert slots().slots_in_use >= 1 + len(held)
    assert slots().one_shots == before.one_shots


def test_a_worker_in_this_process_has_no_slots(engines):
    (worker,) = engines("Gradient", "cpu", "uniproc").executor.collective_rpc("describe")
    assert worker["slots"] is None
