"""What a user of the engine sees, on both executors, with and without an accelerator."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import numpy as np
import pytest
import torch

import sidestream
from sidestream import DiffusionRequest, SamplingParams


def request(prompt="x", *, seed=0, height=64, width=64, **fields):
    return DiffusionRequest(
        prompt=prompt,
        sampling_params=SamplingParams(height=height, width=width, seed=seed),
        **fields,
    )


ways = pytest.mark.parametrize(
    ("platform", "executor"),
    [("cpu", "multiproc"), ("cpu", "uniproc"), ("sim", "multiproc"), ("sim", "uniproc")],
)


@ways
def test_the_readme_snippet_runs_as_written(engines, platform, executor):
    engine = engines("Gradient", platform, executor)
    before = engine.stats()
    handles = [engine.submit(request(seed=i)) for i in range(8)]
    for i, handle in enumerate(handles):
        handle.compute_done.result(timeout=30)
        output = handle.result(timeout=30)
        assert output.output.shape == (3, 64, 64)
        assert (output.output == i).all()
    stats = engine.stats()
    assert stats["submitted"] - before["submitted"] == 8
    assert stats["completed"] - before["completed"] == 8
    assert stats["queued"] == stats["outputs"] == stats["forwards"] == 0


@ways
def test_an_output_buffer_that_the_next_forward_overwrites_does_no_harm(
    engines, platform, executor
):
    engine = engines("OneBuffer", platform, executor)
    handles = [engine.submit(request(seed=i)) for i in range(6)]
    for i, handle in enumerate(handles):
        assert (handle.result(30).output == i).all()


@ways
def test_a_host_array_that_the_next_forward_overwrites_does_no_harm(engines, platform, executor):
    engine = engines("HostBuffer", platform, executor)
    handles = [engine.submit(request(seed=i)) for i in range(6)]
    for i, handle in enumerate(handles):
        tree = handle.result(30).output
        assert isinstance(tree["image"], np.ndarray)
        assert (tree["image"] == i).all()
        assert tree["seed"] == i


@pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
def test_large_inputs_and_large_call_results_pass(engines, executor):
    engine = engines("Echo", executor=executor)
    image = torch.arange(3 * 1024 * 1024, dtype=torch.float32).reshape(3, 1024, 1024)
    output = engine.submit(request("p", inputs={"image": image})).result(30)
    assert output.output["prompt"] == "p"
    assert torch.equal(output.output["inputs"]["image"], image)
    (echoed,) = engine.executor.collective_rpc("echo", (image,))
    assert torch.equal(echoed, image)


def test_an_unpackable_request_fails_in_submit(engines):
    engine = engines("Echo")
    with pytest.raises(sidestream.InvalidRequestError, match=r"inputs.*'bad'"):
        engine.submit(request("p", inputs={"fine": 1, "bad": threading.Lock()}))
    assert engine.submit(request("p")).result(30).output["prompt"] == "p"


def test_what_a_request_holds_may_change_after_submit(engines):
    engine = engines("Echo")
    image = torch.zeros(4, 4)
    handle = engine.submit(request("p", inputs={"image": image}))
    image.fill_(7)
    assert (handle.result(30).output["inputs"]["image"] == 0).all()


def test_pipelines_are_told_how_to_load(engines):
    engine = engines("Gradient")
    assert engine.config.pipeline_options == {"a": [1, 2]}
    assert engine.config.dtype == "float16"
    assert engine.executor.collective_rpc("options") == [{"a": [1, 2]}]
    assert engine.executor.collective_rpc("dtype") == ["torch.float16"]


def test_a_failing_forward_fails_its_request_alone_with_the_original_as_cause(engines):
    engine = engines("Failing")
    bad = engine.submit(request("value", request_id="mine"))
    good = engine.submit(request("x", seed=5))
    with pytest.raises(sidestream.ExecutionError, match="no such color") as caught:
        bad.result(30)
    assert caught.value.request_id == "mine"
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert isinstance(cause, sidestream.RemoteTraceback)
    assert "sidestream_pipes.py" in str(cause)
    with pytest.raises(sidestream.ExecutionError):
        bad.compute_done.result(30)
    assert (good.result(30).output == 5).all()


@pytest.mark.parametrize("executor", ["multiproc", "uniproc"])
@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ("exit", sidestream.ExecutionError, "SystemExit"),
        ("lock", sidestream.ExecutionError, "holds a lock"),
        ("memory", sidestream.DeviceMemoryError, "80 GiB"),
        ("none", sidestream.OutputTransferError, "None"),
        ("two", sidestream.ExecutionError, r"2 payload\(s\) for 1 request"),
        ("lambda", sidestream.OutputTransferError, r"\['frames'\]\[1\]"),
    ],
)
def test_every_way_to_fail_is_told_apart_and_the_worker_goes_on(
    engines, executor, prompt, error, text
):
    engine = engines("Failing", executor=executor)
    with pytest.raises(error, match=text):
        engine.submit(request(prompt)).result(30)
    assert (engine.submit(request(seed=3)).result(30).output == 3).all()
    assert engine.health().ok


def test_calls_run_on_the_worker_and_raise_what_the_method_raised(engines):
    engine = engines("Gradient")
    assert engine.executor.collective_rpc("echo", ({"a": (1, None)},)) == [{"a": (1, None)}]
    assert engine.executor.collective_rpc("echo", (None,)) == [None]
    assert engine.executor.collective_rpc("ping") == ["pong"]
    with pytest.raises(ValueError, match="boom"):
        engine.executor.collective_rpc("fail", ("boom",))
    with pytest.raises(AttributeError, match="no_such_method"):
        engine.executor.collective_rpc("no_such_method")


def test_execute_model_answers_when_the_forward_is_queued(engines):
    engine = engines("Gradient", "sim")
    (answer,) = engine.executor.collective_rpc("execute_model", (request(seed=4),))
    future = engine.executor.wait_output_ready(answer.async_output_id)
    assert future is engine.executor.wait_output_ready(answer.async_output_id)
    assert (future.result(30).output == 4).all()
    assert future.result() is future.result()


def test_an_output_id_that_is_unknown_or_forgotten_has_failed_already(engines, until):
    engine = engines("Gradient")
    with pytest.raises(sidestream.RequestError, match="never issued"):
        engine.executor.wait_output_ready("nobody").result(0)
    handle = engine.submit(request())
    output_id = handle.async_output_id
    handle.result(30)
    assert engine.executor.wait_output_ready(output_id) is handle.future()
    del handle
    # The thread that resolved it holds it a moment longer.
    until(lambda: engine.executor.wait_output_ready(output_id).exception(0) is not None)
    with pytest.raises(sidestream.RequestError, match="nobody holds it"):
        engine.executor.wait_output_ready(output_id).result(0)


def test_callers_ids_may_repeat_be_empty_or_hold_a_slash(engines):
    engine = engines("Gradient")
    ids = ["same", "same", "", "a/b"]
    handles = [engine.submit(request(seed=i, request_id=id_)) for i, id_ in enumerate(ids)]
    for i, (id_, handle) in enumerate(zip(ids, handles, strict=True)):
        output = handle.result(30)
        assert output.request_id == id_
        assert (output.output == i).all()


def test_generate_numbers_the_seeds_and_keeps_the_order(engines):
    engine = engines("Gradient")
    outputs = engine.generate(["a", "b", "c"], height=8, width=8, seed=40)
    assert [int(output.output[0, 0, 0]) for output in outputs] == [40, 41, 42]
    (one,) = engine.generate("a", height=8, width=8, seed=7)
    assert (one.output == 7).all()


def test_a_seed_is_chosen_at_submit_when_none_is_given(engines):
    first, second = engines("Gradient").generate(["a", "b"], height=8, width=8)
    assert not torch.equal(first.output, second.output)
    assert engines("Echo").generate("a")[0].output["prompt"] == "a"


def test_generate_waits_for_room_where_submit_refuses(make_engine, gate):
    engine = make_engine(
        "abort_pipes:Steps", platform="cpu", executor="uniproc", max_queued_requests=2
    )
    outputs = engine.generate([request(seed=i) for i in range(50)])
    assert [int(output.output[0, 0, 0]) for output in outputs] == list(range(50))
    flood = [engine.submit(request(gate.prompt))]
    with pytest.raises(sidestream.QueueFullError, match="max_queued_requests") as caught:
        flood.extend(engine.submit(request()) for _ in range(10))
    assert caught.value.limit == 2
    gate.open()


def test_imap_takes_requests_as_it_yields_outputs(engines):
    engine = engines("Gradient")
    taken = []

    def requests():
        for i in range(20):
            taken.append(i)
            yield request(seed=i)

    outputs = engine.imap(requests(), window=3)
    assert (next(outputs).output == 0).all()
    assert len(taken) <= 5
    assert [int(output.output[0, 0, 0]) for output in outputs] == list(range(1, 20))


def test_handles_can_be_awaited_together_and_canceling_a_task_leaves_the_request(engines):
    engine = engines("Gradient", "sim")

    async def main():
        handles = [engine.submit(request(seed=i)) for i in range(4)]
        canceled = asyncio.ensure_future(_await(handles[0]))
        await asyncio.sleep(0)
        canceled.cancel()
        twice = await asyncio.gather(*(_await(h) for h in handles), *(_await(h) for h in handles))
        outputs = await engine.agenerate(["a", "b"], height=8, width=8, seed=9)
        return twice, outputs

    async def _await(handle):
        return await handle

    twice, outputs = asyncio.run(main())
    assert [int(o.output[0, 0, 0]) for o in twice] == [0, 1, 2, 3] * 2
    assert twice[0] is twice[4]
    assert [int(o.output[0, 0, 0]) for o in outputs] == [9, 10]


def test_futures_work_with_the_standard_library(engines):
    engine = engines("Gradient")
    handles = [engine.submit(request(seed=i)) for i in range(4)]
    done = concurrent.futures.wait([handle.future() for handle in handles], timeout=30).done
    assert len(done) == 4
    assert handles[0].future().cancel() is False


def test_callbacks_run_elsewhere_and_may_not_block(engines, gate):
    engine = engines("abort_pipes:Steps", executor="uniproc")
    quick, slow = engine.submit(request()), engine.submit(request(gate.prompt))
    seen: concurrent.futures.Future = concurrent.futures.Future()

    def callback(future):
        try:
            slow.result(30)
        except RuntimeError as error:
            seen.set_result((threading.current_thread().name, future.done(), str(error)))

    quick.future().add_done_callback(callback)
    name, done, text = seen.result(30)
    assert name == "sidestream-callbacks"
    assert done
    assert "may not wait" in text
    gate.open()
    assert slow.result(30)


def test_a_callback_that_raises_hurts_nobody(engines, caplog):
    engine = engines("Gradient")
    ran = threading.Event()
    future = engine.submit(request()).future()
    future.add_done_callback(lambda _f: 1 / 0)
    future.add_done_callback(lambda _f: ran.set())
    assert ran.wait(30)
    assert "ZeroDivisionError" in caplog.text


def test_outputs_stay_valid_after_close_and_can_be_detached(make_engine):
    engine = make_engine("Gradient", platform="sim")
    output = engine.submit(request(seed=6)).result(30)
    detached = output.detach_copy()
    engine.close()
    assert (output.output == 6).all()
    assert (detached.output == 6).all()
    assert detached.output.data_ptr() != output.output.data_ptr()
    assert output.timings.carrier == "slot"
    assert output.timings.nbytes == 3 * 64 * 64 * 4


def test_a_closed_engine_refuses_and_closing_twice_is_fine(make_engine, gate):
    engine = make_engine("abort_pipes:Steps", platform="cpu", executor="uniproc")
    running = engine.submit(request(gate.prompt))
    queued = [engine.submit(request()) for _ in range(5)]
    engine.close(timeout_s=0.2)
    engine.close()
    for handle in [running, *queued]:
        with pytest.raises(sidestream.EngineClosedError):
            handle.result(5)
    with pytest.raises(sidestream.EngineClosedError):
        engine.submit(request())
    assert not engine.health().ok


def test_a_killed_worker_fails_everything_with_its_signal(make_engine):
    engine = make_engine("Failing", platform="cpu")
    handles = [engine.submit(request("kill", request_id=f"r{i}")) for i in range(5)]
    for handle in handles:
        with pytest.raises(sidestream.WorkerDiedError) as caught:
            handle.result(30)
        assert caught.value.signal == "SIGKILL"
        assert caught.value.exit_code == -9
        assert "r0" in caught.value.request_ids
    assert not engine.health().ok
    assert "SIGKILL" in engine.health().reason
    with pytest.raises(sidestream.WorkerDiedError):
        engine.submit(request())


@pytest.mark.parametrize(
    ("pipeline", "executor", "text"),
    [
        ("LoadRaises", "multiproc", "no weights at /nowhere"),
        ("LoadExits", "multiproc", "exited with code 9"),
        ("NoForward", "uniproc", "'forward'"),
        ("Absent", "uniproc", "sidestream_pipes"),
    ],
)
def test_a_worker_that_does_not_start_says_why(make_engine, pipeline, executor, text):
    with pytest.raises(sidestream.WorkerStartError, match=text) as caught:
        make_engine(pipeline, platform="cpu", executor=executor)
    assert caught.value.stage == "pipeline"
    if pipeline == "LoadRaises":
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        assert "weights are not there" in caught.value.stderr
    if pipeline == "LoadExits":
        assert "last words" in str(caught.value)


@pytest.mark.slow
def test_a_worker_that_hangs_at_start_is_given_up_after_its_last_progress(make_engine):
    with pytest.raises(sidestream.WorkerStartError, match="no sign of progress"):
        make_engine("LoadHangs", platform="cpu", start_timeout_s=3)


def test_an_engine_describes_what_waits_where(engines, gate, until):
    engine = engines("abort_pipes:Steps", "sim")
    prompts = [gate.prompt, "x", "x", "x"]
    handles = [engine.submit(request(p, request_id=f"r{i}")) for i, p in enumerate(prompts)]
    assert gate.reached() == "forward"
    until(lambda: engine.describe().count(": dispatched") == 2)
    lines = engine.describe().splitlines()
    assert "health: ok" in lines[0]
    assert "queue: no worker has room: they compute, or are being restarted" in lines
    assert "group 0: running" in lines
    states = [line.split()[-1] for line in lines if line.split()[-1] in ("dispatched", "queued")]
    assert sorted(states) == ["dispatched", "dispatched", "queued", "queued"]
    assert all(any(f"'r{i}'" in line for line in lines) for i in range(len(handles)))
    gate.open()
    assert all(handle.result(30) for handle in handles)
