"""Too little memory is an error of one request, and nothing grows without a bound."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import sidestream
from sidestream import DiffusionEngine, DiffusionRequest
from sidestream.transport.memory import HostMemoryError

# While tests are collected its names are needed already.
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))

import payload_pipes
from payload_pipes import MIB, fill, is_filled, memory_of, settle

WAYS = [("cpu", "multiproc"), ("sim", "multiproc"), ("cpu", "uniproc"), ("sim", "uniproc")]
BUFFER_BYTES = 8 * MIB  # that of ``couriers``
#: Requests that may be under way when outputs are ready over the limit: at the worker, and on
#: their way to the host.
UNDER_WAY = 2 + 2

#: Both platforms and both executors; the other two pairs are for the soak.
in_every_way = pytest.mark.parametrize(
    "way",
    [
        WAYS[1],
        WAYS[2],
        pytest.param(WAYS[0], marks=pytest.mark.soak),
        pytest.param(WAYS[3], marks=pytest.mark.soak),
    ],
    ids="-".join,
)
in_processes = pytest.mark.parametrize(
    "way", [WAYS[1], pytest.param(WAYS[0], marks=pytest.mark.soak)], ids="-".join
)


def call(engine: DiffusionEngine, method: str, *args):
    return engine.executor.collective_rpc(method, args)[0]


# --- back-pressure --------------------------------------------------------------------------------


def is_stuck(engine: DiffusionEngine) -> bool:
    """Tell whether nothing more is sent until outputs are taken."""
    counts = engine.stats()
    is_idle = counts["outputs"] == counts["queued"] and counts["forwards"] == 0
    return is_idle and counts["ready_bytes"] > BUFFER_BYTES


@in_every_way
@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_consumer_that_stops_reading_stops_the_work_and_loses_nothing(
    couriers, eventually, way, count
):
    engine, nbytes = couriers(way), 256 << 10
    assert is_filled(engine.submit(fill(nbytes)).result(30), nbytes)
    pids = {os.getpid(), call(engine, "pid")}
    before = {pid: memory_of(pid) for pid in pids}
    handles = [engine.submit(fill(nbytes, seed)) for seed in range(count)]
    assert eventually(lambda: is_stuck(engine), 30)
    assert engine.stats()["ready_bytes"] <= BUFFER_BYTES + UNDER_WAY * (nbytes + 4096)
    for pid in pids:
        assert memory_of(pid) - before[pid] < count * nbytes // 2
    assert call(engine, "describe")["places_free"] == 2
    for seed, handle in enumerate(handles):
        assert is_filled(handle.result(30), nbytes, seed)
        handles[seed] = None
    assert engine.stats()["ready_bytes"] == 0


@in_every_way
def test_the_last_of_many_large_requests_can_be_waited_for_first(couriers, way):
    engine = couriers(way)
    handles = [engine.submit(fill(MIB, seed)) for seed in range(100)]
    assert is_filled(handles[-1].result(60), MIB, 99)
    for seed, handle in enumerate(handles):
        assert is_filled(handle.result(30), MIB, seed)


@pytest.mark.slow
def test_a_request_that_is_waited_for_runs_again_though_outputs_are_not_taken(eventually, tmp_path):
    engine = payload_pipes.start(host_buffer_bytes=BUFFER_BYTES)
    try:
        handles = [engine.submit(fill(MIB, seed)) for seed in range(12)]
        assert eventually(lambda: is_stuck(engine), 30)
        last = engine.submit(DiffusionRequest(f"die-once {tmp_path / 'died'}"))
        assert last.result(60).output.sum() == MIB
        for seed, handle in enumerate(handles):
            assert is_filled(handle.result(30), MIB, seed)
    finally:
        engine.close()


@in_every_way
def test_a_handle_that_is_dropped_makes_room(couriers, eventually, way):
    engine = couriers(way)
    handles = [engine.submit(fill(MIB, seed)) for seed in range(40)]
    assert eventually(lambda: is_stuck(engine), 30)
    last = handles.pop()
    assert not last.done()
    del handles[:]
    assert eventually(last.done, 30)
    assert is_filled(last.result(0), MIB, 39)
    assert engine.drain(30)
    assert engine.stats()["ready_bytes"] == 0


@pytest.mark.soak  # in short it is in tests/engine/test_observability.py
@pytest.mark.parametrize("way", WAYS[:2], ids="-".join)
def test_without_a_buffer_every_output_waits_for_its_reader(eventually, way):
    engine = payload_pipes.start(*way, host_buffer_bytes=0)
    try:
        handles = [engine.submit(fill(MIB, seed)) for seed in range(20)]
        assert eventually(lambda: engine.stats()["ready_bytes"] > 0, 30)
        for seed, handle in enumerate(handles):
            output = handle.result(30)
            assert is_filled(output, MIB, seed)
            assert output.timings.carrier == "one-shot"
    finally:
        engine.close()


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.slow
@in_processes
def test_slots_that_are_dropped_all_at_once_all_come_back(couriers, way):
    engine, nbytes = couriers(way), 100 * 256
    for _ in range(2):
        # 327 such slots fit into the arenas: any that is missing next time shows as a one-shot.
        outputs = list(engine.imap(fill(nbytes, seed) for seed in range(321)))
        assert all(is_filled(output, nbytes, seed) for seed, output in enumerate(outputs))
        assert {output.timings.carrier for output in outputs} == {"slot"}
        del outputs
        settle(engine)


@in_processes
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.soak)])
def test_an_output_that_is_held_keeps_its_bits_while_others_come_and_go(couriers, way, count):
    engine = couriers(way)
    held = engine.submit(fill(MIB, 77)).result(30)
    for seed, output in enumerate(engine.imap(fill(MIB, seed) for seed in range(count))):
        assert is_filled(output, MIB, seed)
    assert is_filled(held, MIB, 77)


@pytest.mark.slow
@in_processes
def test_idle_arenas_do_not_keep_larger_outputs_from_slots(couriers, way):
    engine = couriers(way)
    held = list(engine.imap(fill(10_000) for _ in range(800)))
    assert {output.timings.carrier for output in held} == {"slot"}
    del held
    settle(engine)
    assert engine.submit(fill(BUFFER_BYTES)).result(30).timings.carrier == "slot"


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AS", "DATA"])
@in_processes
def test_a_worker_without_memory_fails_the_request_and_does_the_next(couriers, way, limit):
    engine, nbytes = couriers(way), 96 * MIB
    pid = call(engine, "pid")
    call(engine, "keep", nbytes)
    call(engine, "limit", limit, 32 * MIB)
    try:
        for seed in range(3):
            with pytest.raises(
                sidestream.OutputTransferError, match=r"memory|Unable to allocate"
            ) as caught:
                engine.submit(DiffusionRequest("kept")).result(30)
            assert isinstance(caught.value.__cause__, MemoryError)
            assert is_filled(engine.submit(fill(MIB, seed)).result(30), MIB, seed)
    finally:
        call(engine, "limit", limit, None)
    assert engine.submit(DiffusionRequest("kept")).result(30).output.sum() == nbytes
    call(engine, "keep", 1)
    assert call(engine, "pid") == pid


@in_processes
def test_a_worker_without_memory_for_a_request_fails_it_and_does_the_next(couriers, way):
    engine = couriers(way)
    pid = call(engine, "pid")
    call(engine, "limit", "AS", 32 * MIB)
    try:
        large = DiffusionRequest("echo", inputs={"tree": bytes(128 * MIB)})
        with pytest.raises(sidestream.SidestreamError, match="shared host memory"):
            engine.submit(large).result(30)
        with pytest.raises(HostMemoryError):
            engine.executor.collective_rpc("pid", (bytes(128 * MIB),))
        assert is_filled(engine.submit(fill(MIB, 7)).result(30), MIB, 7)
    finally:
        call(engine, "limit", "AS", None)
    assert call(engine, "pid") == pid


@pytest.mark.slow
def test_a_main_process_without_memory_fails_what_it_cannot_map_and_goes_on(script):
    program = script("""
from payload_pipes import *
from sidestream.transport.memory import HostMemoryError

engine = start(host_buffer_bytes=1 << 30)
pid = engine.executor.collective_rpc("pid")
large, text = fill(96 * MIB), DiffusionRequest(f"text {64 * MIB}")
limit_memory("AS", 32 * MIB)
for _ in range(2):
    for request in large, text:
        error = engine.submit(request).exception(60)
        assert isinstance(error, sidestream.OutputTransferError), repr(error)
        assert isinstance(error.__cause__, HostMemoryError), repr(error.__cause__)
    try:
        engine.executor.collective_rpc("text", (64 * MIB,))
        raise AssertionError("it was mapped")
    except HostMemoryError:
        pass
    assert is_filled(engine.submit(fill(MIB, 7)).result(60), MIB, 7)
assert engine.stats()["ready_bytes"] == 0
limit_memory("AS", None)
assert is_filled(engine.submit(large).result(60), 96 * MIB)
assert len(engine.submit(text).result(60).output["text"]) == 64 * MIB
assert engine.executor.collective_rpc("pid") == pid
engine.close()
""")
    finish(program)


@pytest.mark.slow
@pytest.mark.parametrize("large", [16 * MIB, pytest.param(448 * MIB, marks=pytest.mark.soak)])
def test_dev_shm_may_be_small_and_full(script, large):
    program = script(
        """
from payload_pipes import *

try:
    mount_for_myself("/dev/shm", size="8m")
except NoNamespace as error:
    say("no", error)
    sys.exit()
say("yes")
engine = start()
for is_full in False, True:
    if is_full:
        try:
            with open("/dev/shm/full", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
    for nbytes in 64 << 10, int(sys.argv[1]):
        assert is_filled(engine.submit(fill(nbytes, 3)).result(60), nbytes, 3)
left = os.statvfs("/dev/shm")
assert left.f_bavail == 0, left
engine.close()
""",
        large,
    )
    skip_without_mounts(program)
    finish(program)


@pytest.mark.soak
def test_what_a_control_group_would_kill_for_is_refused_before(script):
    """With files in place of the real group: to limit that one takes more than a test may do."""
    program = script("""
from payload_pipes import *

mounts = [line.split() for line in open("/proc/self/mountinfo") if " - cgroup2 " in line]
if not mounts:
    say("no cgroup2 is mounted here")
    sys.exit()
own = next(line[4:-1] for line in open("/proc/self/cgroup") if line.startswith("0::/"))
try:
    mount_for_myself(mounts[0][4])
except NoNamespace as error:
    say("no", error)
    sys.exit()
say("yes")
group = Path(mounts[0][4] + own)
group.mkdir(parents=True, exist_ok=True)
(group / "memory.max").write_text(str(256 * MIB))
(group / "memory.current").write_text(str(192 * MIB))
engine = start(host_buffer_bytes=1 << 30)
pid = engine.executor.collective_rpc("pid")
for _ in range(3):
    error = engine.submit(fill(100 * MIB)).exception(60)
    assert isinstance(error, sidestream.OutputTransferError), repr(error)
    assert "the memory limit leaves" in str(error.__cause__), error
    assert is_filled(engine.submit(fill(MIB, 7)).result(60), MIB, 7)
large = DiffusionRequest("echo", inputs={"tree": bytes(100 * MIB)})
error = engine.submit(large).exception(60)
assert "the memory limit leaves" in str(error), repr(error)
(group / "memory.max").write_text("max")
assert is_filled(engine.submit(fill(100 * MIB)).result(60), 100 * MIB)
assert engine.executor.collective_rpc("pid") == pid
engine.close()
""")
    skip_without_mounts(program)
    finish(program)


@pytest.mark.soak
def test_a_thousand_held_outputs_do_not_need_a_thousand_descriptors(script):
    program = script("""
import resource
from payload_pipes import *

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
engine = start(host_buffer_bytes=8 * MIB)
outputs = list(engine.imap(fill(40_000, seed) for seed in range(1000)))
assert all(is_filled(output, 40_000, seed) for seed, output in enumerate(outputs))
assert {output.timings.carrier for output in outputs} == {"slot", "one-shot"}
engine.close()
""")
    finish(program)


def skip_without_mounts(program) -> None:
    answer = program.line()
    if answer != ["yes"]:
        pytest.skip(" ".join(answer))


def finish(program) -> None:
    code, stderr = program.end(90)
    assert code == 0, stderr
    assert stderr == ""
