"""Frames between processes: whole, in order, with their descriptors, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.transport.channel import Channel, ChannelClosed, Frame, channel_pair
from sidestream.transport.frame import MAX_INLINE_BYTES, MAX_OUTPUT_ID_BYTES
from sidestream.transport.memory import HostMemoryError

WORD = st.integers(0, 2**64 - 1)


@pytest.fixture
def pair():
    ours, theirs = channel_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def taken_apart(frame: Frame) -> dict:
    """Give a frame's fields, with what its descriptor leads to instead of its number."""
    fields = frame._replace(body=bytes(frame.body))._asdict()
    if frame.slot_fd is not None:
        fields["slot_fd"] = os.pread(frame.slot_fd, 100, 0)
        os.close(frame.slot_fd)
    return fields


frames = st.builds(
    Frame,
    kind=st.integers(0, 255),
    rpc_id=WORD,
    attempt=WORD,
    output_id=st.text(max_size=100),
    arena_id=WORD,
    offset=WORD,
    nbytes=WORD,
    token=WORD,
    arena_nbytes=WORD,
    is_one_shot=st.booleans(),
    body=st.sampled_from([0, 1, 1000, MAX_INLINE_BYTES - 1, MAX_INLINE_BYTES])
    .flatmap(lambda n: st.sampled_from([n, n + 1, n * 5]))
    .map(lambda n: bytes(range(256)) * (n // 256) + bytes(n % 256)),
    slot_fd=st.none(),
    body_error=st.none(),
)


@settings(max_examples=40)
@given(batch=st.lists(st.tuples(frames, st.booleans()), max_size=6))
def test_frames_arrive_whole_and_in_order(batch):
    ours, theirs = channel_pair()
    sent = []
    reader_got = []
    reader = threading.Thread(
        target=lambda: [reader_got.append(taken_apart(theirs.receive())) for _ in batch]
    )
    reader.start()
    for number, (frame, has_fd) in enumerate(batch):
        fd = memfd(b"slot %d" % number) if has_fd else None
        frame = frame._replace(slot_fd=fd)
        ours.send(frame)
        sent.append(taken_apart(frame))
    reader.join()
    assert reader_got == sent
    ours.close()
    theirs.close()


def test_a_large_body_can_be_written_to_and_stays_its_receivers(pair):
    body = bytes(range(256)) * 1000
    pair[0].send(Frame(kind=1, body=body))
    pair[0].send(Frame(kind=1, body=memoryview(body)))
    first, second = pair[1].receive(), pair[1].receive()
    first.body[:3] = b"abc"
    assert bytes(first.body) == b"abc" + body[3:]
    assert bytes(second.body) == body


def test_sending_leaves_no_descriptor_behind(pair, holdings):
    before = holdings()
    for _ in range(20):
        pair[0].send(Frame(kind=1, body=bytes(100_000)))
        pair[1].receive()
    assert holdings() == before


def test_a_channel_that_does_not_block_says_when_nothing_is_there(pair):
    pair[1].set_blocking(False)
    assert pair[1].receive() is None
    assert pair[1].receive_bytes() is None
    pair[0].send(Frame(kind=7))
    assert pair[1].receive().kind == 7


def test_polling_waits_for_a_frame_and_for_the_end(pair):
    assert not pair[1].poll(0)
    pair[0].send(Frame(kind=7))
    assert pair[1].poll(60)
    pair[1].receive()
    pair[0].close()
    assert pair[1].poll(60)


@pytest.mark.parametrize("nbytes", [10_000, 300_000], ids=["inline", "memfd"])
def test_a_full_socket_refuses_a_frame_and_takes_it_later(pair, holdings, nbytes):
    ours, theirs = pair
    before = holdings()[0]
    sent = 0
    while ours.try_send(frame := Frame(kind=1, rpc_id=sent, body=bytes([sent % 251]) * nbytes)):
        sent += 1
    waiting = holdings()[0] - before
    assert waiting == (nbytes > MAX_INLINE_BYTES)  # copied once, and kept for the next attempt
    assert not ours.try_send(frame)
    assert holdings()[0] - before == waiting
    for expected in range(sent):
        assert theirs.receive().rpc_id == expected
    assert ours.try_send(frame)
    assert bytes(theirs.receive().body) == frame.body
    assert holdings()[0] == before


def test_a_frame_that_gives_way_to_another_is_forgotten(pair, holdings):
    ours, theirs = pair
    before = holdings()[0]
    sent = 0
    while ours.try_send(Frame(kind=1, body=bytes(100_000))):
        sent += 1
    for _ in range(sent):
        theirs.receive()
    assert ours.try_send(Frame(kind=2))
    assert theirs.receive().kind == 2
    assert holdings()[0] == before


def test_closing_forgets_a_frame_that_waits(holdings):
    before = holdings()
    ours, theirs = channel_pair()
    while ours.try_send(Frame(kind=1, body=bytes(100_000))):
        pass
    ours.close()
    theirs.close()
    assert holdings() == before


def test_many_threads_may_send_at_once(pair):
    def send(sender):
        for number in range(100):
            pair[0].send(Frame(kind=sender, rpc_id=number, body=bytes([sender]) * 3000))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    got = [pair[1].receive() for _ in range(400)]
    for thread in threads:
        thread.join()
    for sender in range(4):
        own = [frame for frame in got if frame.kind == sender]
        assert [frame.rpc_id for frame in own] == list(range(100))
        assert all(bytes(frame.body) == bytes([sender]) * 3000 for frame in own)


def test_a_killed_peer_is_heard_out_before_its_end_is_reported(fork):
    ours, theirs = channel_pair()
    reading, writing = os.pipe()

    def work():
        ours.close()
        for number in range(5):
            theirs.send(Frame(kind=1, rpc_id=number, body=bytes(number * 30_000)))
        os.write(writing, b"sent")
        signal.pause()

    child = fork(work)
    theirs.close()
    # It lies unread in the child when that dies, so the kernel reports a reset before all else.
    ours.send(Frame(kind=2))
    os.read(reading, 4)
    child.kill()
    got = [ours.receive() for _ in range(5)]
    assert [(frame.rpc_id, len(frame.body)) for frame in got] == [
        (number, number * 30_000) for number in range(5)
    ]
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="gone"):
            ours.receive()
    for fd in (reading, writing):
        os.close(fd)
    ours.close()


def test_sending_to_a_dead_peer_raises_and_what_it_sent_can_still_be_read(fork):
    ours, theirs = channel_pair()

    def work():
        ours.close()
        theirs.send(Frame(kind=1, body=b"last words"))
        signal.pause()

    child = fork(work)
    theirs.close()
    ours.send(Frame(kind=2))
    ours.poll()
    child.kill()
    for send in (ours.send, ours.try_send):
        with pytest.raises(ChannelClosed):
            send(Frame(kind=2))
    with pytest.raises(ChannelClosed):
        ours.try_send_bytes(b"x")
    assert ours.receive().body == b"last words"
    with pytest.raises(ChannelClosed):
        ours.receive()
    ours.close()


def test_a_blocked_sender_is_woken_by_the_death_of_its_reader(pair):
    ours, theirs = pair
    while ours.try_send_bytes(bytes(8192)):
        pass
    failures = []

    def send():
        try:
            ours.send(Frame(kind=1, body=bytes(8192)))
        except ChannelClosed as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    theirs.close()
    thread.join(timeout=60)
    assert len(failures) == 1


def test_a_closed_end_says_so(pair):
    pair[0].close()
    pair[0].close()
    with pytest.raises(ChannelClosed, match="This end"):
        pair[0].receive()
    with pytest.raises(ChannelClosed, match="This end"):
        pair[0].send(Frame(kind=1))
    with pytest.raises(ChannelClosed, match="This end"):
        pair[0].poll()
    assert pair[0].fileno() == -1


def test_plain_messages_arrive_as_they_are(pair):
    assert pair[0].try_send_bytes(b"abc")
    pair[0].send_bytes(bytes(8192))
    assert (pair[1].receive_bytes(), pair[1].receive_bytes()) == (b"abc", bytes(8192))


@pytest.mark.parametrize(
    ("message", "fds"),
    [
        (b"\x63" + bytes(100), 0),
        (b"\x01", 0),
        (b"\x01" + bytes(71), 1),
        (b"\x01\x00\x04\x00" + bytes(68), 0),
        (bytes([1]) + bytes(63) + struct.pack("<Q", 5), 0),
        (bytes(90_000), 2),
    ],
    ids=["version", "short", "stray descriptor", "no descriptor", "body cut", "too long"],
)
def test_what_is_no_frame_ends_the_connection_and_closes_what_came_along(holdings, message, fds):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    extra = [memfd(b"") for _ in range(fds)]
    before = holdings()
    socket.send_fds(theirs, [message], extra)
    with pytest.raises(ChannelClosed):
        channel.receive()
    assert holdings() == before
    for fd in extra:
        os.close(fd)
    channel.close()
    theirs.close()


def test_a_reader_without_free_descriptors_ends_the_connection(fork):
    def starve():
        ours, theirs = channel_pair()
        ours.send(Frame(kind=1, body=bytes(100_000), slot_fd=0))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        spare = []
        try:
            while True:
                spare.append(os.dup(0))
        except OSError:
            pass
        os.close(spare.pop())  # room for one of the two
        with pytest.raises(ChannelClosed, match="no free file descriptor"):
            theirs.receive()
        return os.dup(0) == spare[-1] + 1

    fork(starve).result()


def test_a_body_that_cannot_be_mapped_is_told_by_its_frame(fork):
    def starve():
        ours, theirs = channel_pair()
        ours.send(Frame(kind=3, rpc_id=5, output_id="x", body=bytes(32 << 20)))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), -1))
        frame = theirs.receive()
        assert isinstance(frame.body_error, HostMemoryError)
        return frame.kind, frame.rpc_id, frame.output_id, len(frame.body)

    assert fork(starve).result() == (3, 5, "x", 0)


def test_a_body_without_memory_is_not_sent(fork, holdings):
    def starve():
        ours, theirs = channel_pair()
        theirs.set_blocking(False)
        before = holdings()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))
        for send in (ours.send, ours.try_send):
            with pytest.raises(HostMemoryError):
                send(Frame(kind=1, body=bytes(2 << 20)))
        assert theirs.receive() is None
        ours.send(Frame(kind=2))
        return theirs.receive().kind, holdings() == before

    assert fork(starve).result() == (2, True)


def test_an_output_id_has_a_longest_length(pair):
    with pytest.raises(ValueError, match="too long"):
        pair[0].send(Frame(kind=1, output_id="x" * (MAX_OUTPUT_ID_BYTES + 1)))


def test_a_channel_can_be_given_to_a_process_that_multiprocessing_spawns(pair):
    ours, theirs = pair
    theirs.set_blocking(False)
    process = multiprocessing.get_context("spawn").Process(
        target=Channel.send, args=(theirs, Frame(kind=9, rpc_id=4, body=bytes(100_000)))
    )
    process.start()
    got = ours.receive()
    process.join()
    assert (got.kind, got.rpc_id, len(got.body), process.exitcode) == (9, 4, 100_000, 0)


def test_too_many_descriptors_on_their_way_only_delay_a_sender(fork):
    def work():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
        if os.getuid() == 0:
            os.setuid(65534)  # root may have any number of them on their way
        ours, theirs = channel_pair()
        frames = [Frame(kind=1, rpc_id=number, slot_fd=0) for number in range(100)]
        sent = 0
        while ours.try_send(frames[sent]):
            sent += 1
        sender = threading.Thread(target=lambda: [ours.send(frame) for frame in frames[sent:]])
        sender.start()
        got = []
        while len(got) < len(frames):
            frame = theirs.receive()
            got.append(frame.rpc_id)
            os.close(frame.slot_fd)
        sender.join()
        return sent, got

    sent, got = fork(work).result()
    assert 0 < sent < 100
    assert got == list(range(100))
