"""What pipelines and payloads raise: it reaches its caller, and nothing else suffers."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from traceback import format_exception_only

import pytest

import sidestream
from sidestream import DiffusionRequest, ExecutionError, OutputTransferError, SamplingParams

#: Two of the four in the fast cut: each platform and each executor once.
FAST = [("sim", "multiproc"), ("cpu", "uniproc")]
WAYS = [
    pytest.param((platform, executor), id=f"{platform}-{executor}", marks=marks)
    for platform in ("cpu", "sim")
    for executor in ("multiproc", "uniproc")
    for marks in [() if (platform, executor) in FAST else pytest.mark.soak]
]

#: What is said of each poison, wherever it ends up as an object of its own class or as a stand-in.
SAID = {
    "holds a lock": "HoldsLock: locked in",
    "other signature": "OtherSignature: code 7: look here",
    "reduce raises": "ReduceRaises: in one piece",
    "reduce exits": "ReduceExits: in one piece",
    "setstate raises": "SetstateRaises: apart for good",
    "class is missing in main": "Strange: from nowhere",
    "str raises": "StrRaises: (its message can't be shown: __str__ raised ValueError)",
    "str exits": "StrExits: (its message can't be shown: __str__ raised SystemExit)",
    "is false": "IsFalse: not true",
    "is frozen": "Frozen",
    "own error that can't travel": "ours, locked",
    "SystemExit": "SystemExit: 3",
    "KeyboardInterrupt": "KeyboardInterrupt: not by a keyboard",
    "GeneratorExit": "GeneratorExit: enough",
    "StopIteration": "StopIteration: no more",
    "group": "ExceptionGroup: several",
    "base group": "BaseExceptionGroup: several",
    "cycle of causes": "ValueError: first of a cycle",
    "chain of 100 causes": "RuntimeError: link 99",
    "400 KB message": "ValueError: xxx",
    "3 MB message": "ValueError: yyy",
    "holds 30 MB": "Keeps: heavy",
}
#: These can't be rebuilt elsewhere, so a stand-in comes with their name and message.
STAND_INS = {
    "is frozen",
    "holds a lock",
    "other signature",
    "reduce raises",
    "reduce exits",
    "setstate raises",
    "class is missing in main",
    "own error that can't travel",
    "group",
    "3 MB message",
    "holds 30 MB",
}


def request(prompt="x", *, seed=0, **inputs):
    return DiffusionRequest(
        prompt, SamplingParams(height=64, width=64, seed=seed), inputs=inputs or None
    )


def causes(error):
    while (error := error.__cause__) is not None:
        yield error


@pytest.fixture(params=WAYS)
def engine(request, shared):
    engine = shared("faults_pipes:Faulty", *request.param)
    yield engine
    # Whatever happened: the same worker goes on, and nothing is left of it.
    assert engine.health().ok
    assert (
        engine.submit(DiffusionRequest("x", SamplingParams(seed=5))).result(30).output == 5
    ).all()
    counts = engine.stats()
    assert counts["outputs"] == counts["forwards"] == counts["calls"] == 0


def is_local(engine):
    return engine.config.executor == "uniproc"


# --- exceptions -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", SAID)
def test_whatever_a_forward_raises_its_caller_hears_what_and_where(engine, what, monkeypatch):
    # A forward of this process, in an earlier test, may have made it importable here.
    monkeypatch.delitem(sys.modules, "only_in_the_worker", raising=False)
    handle = engine.submit(request("raise", what=what))
    with pytest.raises(ExecutionError) as caught:
        handle.result(30)
    error = caught.value
    assert SAID[what] in str(error)
    assert len(str(error)) < 3000
    assert error.request_id == handle.request_id
    found = list(causes(error))
    assert "in do_raise" in str(found[-1])
    assert isinstance(found[-1], sidestream.RemoteTraceback)
    name = SAID[what].partition(":")[0] if what != "own error that can't travel" else "LockedEx"
    if what in STAND_INS and not is_local(engine):
        assert name in str(found[0])
    elif what != "own error that can't travel":
        assert name in type(found[0]).__name__


def test_a_message_of_400_kb_arrives_whole_in_the_cause(engine):
    error = engine.submit(request("raise", what="400 KB message")).exception(30)
    assert str(error.__cause__) == "x" * 400_000
    assert "characters]" in str(error)


@pytest.mark.parametrize("what", SAID)
def test_whatever_a_called_method_raises_reaches_the_caller(engine, what):
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.executor.collective_rpc, "raise_", (what,), timeout_s=30)
        error = call.exception(30)
    # A SystemExit of the worker would end the main process if it were raised there as it is.
    assert isinstance(error, Exception)
    told = ["".join(format_exception_only(one)) for one in (error, *causes(error))]
    name = "LockedEx" if what.startswith("own") else SAID[what].partition(":")[0]
    assert any(name in line for line in told)
    assert "in raise_" in told[-1]


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("how", ["attribute", "local", "hidden context", "cause", "group"])
def test_what_an_exception_kept_is_gone_without_another_request(
    engine, eventually, tmp_path, where, how
):
    if where == "device" and engine.platform.name == "cpu":
        return  # the CPU has no memory but the host's
    note = tmp_path / "gone"
    handle = engine.submit(request("keep", note=str(note), where=where, how=how))
    error = handle.exception(30)
    assert isinstance(error, ExecutionError)
    if is_local(engine) and how != "local":
        # There the exception itself is handed out; who holds it holds what it keeps.
        assert not note.exists()
        del handle, error
    assert eventually(note.exists)


# --- what is sent and what comes back ---------------------------------------------------------

KINDS = [ValueError, SystemExit, KeyboardInterrupt]


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_cannot_be_taken_apart_is_named(engine, kind):
    with pytest.raises(OutputTransferError, match="stays in one piece") as caught:
        engine.submit(request("stubborn", kind=kind)).result(30)
    if kind is ValueError:
        assert "['deep'][1]" in str(caught.value)
    assert any(isinstance(cause, kind) for cause in causes(caught.value))


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_output_that_falls_apart_here_gives_its_slot_back(engine, kind):
    handle = engine.submit(request("fragile", kind=kind, also_at_home=True))
    with pytest.raises(OutputTransferError, match="fell apart") as caught:
        handle.result(30)
    assert any(isinstance(cause, kind) for cause in causes(caught.value))
    assert handle.exception(0) is caught.value
    assert engine.stats()["ready_bytes"] == 0


def test_an_interrupted_decoding_interrupts_its_caller_and_fails_the_next(shared):
    engine = shared("faults_pipes:Faulty", "sim")
    handle = engine.submit(request("fragile", kind=KeyboardInterrupt, also_at_home=False))
    handle.output_ready.result(30)
    with pytest.raises(KeyboardInterrupt):
        handle.result(30)
    with pytest.raises(OutputTransferError, match="KeyboardInterrupt came"):
        handle.result(30)


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_cannot_be_taken_apart_fails_in_submit(engine, kind):
    from faults_pipes import Stubborn

    wanted = sidestream.InvalidRequestError if kind is ValueError else kind
    with pytest.raises(wanted, match="stays in one piece"):
        engine.submit(request("payload", where=Stubborn(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_falls_apart_in_the_worker_fails_its_request(engine, kind):
    from faults_pipes import Fragile

    handle = engine.submit(request("payload", where=Fragile(kind, also_at_home=True)))
    with pytest.raises(sidestream.InvalidRequestError, match="fell apart") as caught:
        handle.result(30)
    assert caught.value.request_id == handle.request_id
    assert any(isinstance(cause, kind) for cause in causes(caught.value))


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_that_falls_apart_in_the_worker_fails_its_call(engine, kind):
    from faults_pipes import Fragile

    with pytest.raises(Exception, match="fell apart"):
        engine.executor.collective_rpc("echo", (Fragile(kind, also_at_home=True),), timeout_s=30)


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("None", ExecutionError, "Faulty.forward returned NoneType; it must return a sequence"),
        ("a number", ExecutionError, "returned int"),
        ("text", ExecutionError, "returned str"),
        ("a dict", ExecutionError, "returned dict"),
        ("a generator", ExecutionError, "returned generator"),
        ("a tensor", ExecutionError, "Tensor"),
        ("nothing", ExecutionError, r"returned 0 payload\(s\) for 1 request"),
        ("one too many", ExecutionError, r"returned 2 payload\(s\) for 1 request"),
        ("an uncountable list", ExecutionError, "uncounted"),
        ("a None inside", OutputTransferError, "None is no payload"),
        ("a lock inside", OutputTransferError, r"output\['a'\]\[0\].*lock"),
        ("a meta tensor", OutputTransferError, "meta device"),
    ],
)
def test_a_forward_that_returns_garbage_is_told_what_it_returned(engine, what, kind, said):
    with pytest.raises(kind, match=said):
        engine.submit(request("garbage", what=what)).result(30)


# --- the start --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ("NoLoad", "'load'"),
        ("LoadsNothing", "returns a pipeline, not NoneType"),
        ("Nowhere", "defines"),
    ],
)
def test_a_pipeline_that_is_none_is_refused_at_start(start, pipeline, said):
    with pytest.raises(sidestream.WorkerStartError, match=said):
        start(f"faults_pipes:{pipeline}", executor="uniproc")


POISONS = [
    "SystemExit",
    "holds a lock",
    "class is missing in main",
    "base group",
    "3 MB message",
    "str raises",
    "str exits",
]


@pytest.mark.parametrize("executor", [pytest.param("multiproc", marks=pytest.mark.soak), "uniproc"])
@pytest.mark.parametrize("what", POISONS)
def test_whatever_load_raises_the_constructor_says_so(start, what, executor):
    with pytest.raises(sidestream.WorkerStartError) as caught:
        start("faults_pipes:LoadsAPoison", executor=executor, pipeline_options={"what": what})
    told = ["".join(format_exception_only(one)) for one in (caught.value, *causes(caught.value))]
    name = "LockedEx" if what.startswith("own") else SAID[what].partition(":")[0]
    assert any(name in line for line in told)


# --- device memory of what went well ----------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "private"),
    [
        ("multiproc", False),
        ("uniproc", True),
        ("uniproc", False),
        pytest.param("multiproc", True, marks=pytest.mark.soak),
    ],
)
def test_an_output_that_is_out_leaves_no_device_memory_behind(
    shared, eventually, tmp_path, executor, private
):
    pipeline = "PrivateFaulty" if private else "Faulty"
    engine = shared(f"faults_pipes:{pipeline}", "sim", executor)
    (free,) = engine.executor.collective_rpc("memory")
    note = tmp_path / "gone"
    output = engine.submit(request("watched", note=str(note), seed=3)).result(30)
    assert eventually(note.exists)
    assert (output.output["image"] == 3).all()
    assert engine.executor.collective_rpc("memory") == [free]
