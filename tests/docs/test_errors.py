"""The error tree: documented, picklable with its attributes, chained."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

import sidestream
from sidestream import errors

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()

EXAMPLES = [
    errors.SidestreamError("text"),
    errors.ConfigError("dtype", "int3", "'auto'"),
    errors.MissingDependencyError("torch", "The engine", "pip install torch"),
    errors.EngineClosedError("closed"),
    errors.InternalError("An invariant does not hold."),
    errors.PluginError("text", plugin="npu"),
    errors.PluginLoadError("text", plugin="npu", entry_point="sidestream_npu"),
    errors.PluginContractError("text", plugin="npu", hook="probe"),
    errors.PlatformError("text", platform="npu"),
    errors.PlatformNotFoundError("text", platform="npu", reasons={"npu": "no device"}),
    errors.AmbiguousPlatformError(["cuda", "npu"]),
    errors.DeviceLostError("text", platform="npu", device="npu:0"),
    errors.RequestError("text", request_id="r"),
    errors.InvalidRequestError("text", request_id="r"),
    errors.QueueFullError(limit=3, request_id="r"),
    errors.ExecutionError("text", request_id="r"),
    errors.DeviceMemoryError("text", request_id="r"),
    errors.OutputTransferError("text", request_id="r"),
    errors.RequestTimeoutError("text", timeout_s=1.5, request_id="r"),
    errors.RequestAbortedError(outcome=sidestream.AbortOutcome.STOPPED, step=3, request_id="r"),
    errors.WorkerError("text", rank=1, pid=2),
    errors.WorkerStartError("text", rank=1, pid=2, stage="pipeline", stderr="words"),
    errors.WorkerDiedError(rank=1, pid=2, exit_code=-9, request_ids=["a", "b"]),
    errors.WorkerHungError("text", rank=1, pid=2, silent_s=300.0),
    errors.RemoteTraceback("Traceback"),
]
CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and value.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_pickles_with_its_text_and_attributes(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_there_is_an_example_of_every_error():
    assert {type(error) for error in EXAMPLES} == set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_exported_and_on_its_page(cls):
    assert getattr(sidestream, cls.__name__) is cls
    assert f"`{cls.__name__}`" in PAGE


def test_a_killed_worker_is_told_apart_from_one_that_exited():
    killed = errors.WorkerDiedError(rank=0, pid=1, exit_code=-11)
    exited = errors.WorkerDiedError(rank=0, pid=1, exit_code=3)
    unknown = errors.WorkerDiedError(rank=0, pid=1, exit_code=None)
    assert (killed.signal, killed.exit_code) == ("SIGSEGV", -11)
    assert exited.signal is None
    assert "code 3" in str(exited)
    assert "unknown status" in str(unknown)
