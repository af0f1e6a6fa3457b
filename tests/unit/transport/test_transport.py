"""Bytes between actors: order, batches, bad frames, privacy; over sockets and in memory alike."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from shared.config import Settings
from shared.errors import ConfigError, FatalError
from shared.messages import AbortRequest, SchedulerInbox, encode
from shared.transport import MemoryTransport, Transport, UnixTransport, make_transport, pick, rank, zeromq
from shared.transport.keys import KeyFile, load_keys
from shared.transport.watch import RETURN_SECONDS
from shared.transport.zeromq import MAX_WATCHED, Way, ZmqTransport

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["memory", "ipc", "tcp"])
async def transport(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Transport]:
    made: Transport
    if request.param == "memory":
        made = MemoryTransport()
    else:
        run = str(tmp_path / "run")
        made = make_transport(Settings(transport=request.param, runtime_dir=run, advertise_host="127.0.0.1"))
    yield made
    made.close()


async def test_messages_arrive_in_order_and_in_batches(transport: Transport) -> None:
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    for index in range(1000):
        outbox.send(inbox.address, AbortRequest(str(index)))
        if index % 100 == 99:
            outbox.flush()
    received: list[str] = []
    num_batches = 0
    while len(received) < 1000:
        received += [message.request_id for message in await asyncio.wait_for(inbox.recv_batch(), 5)]
        num_batches += 1
    assert received == [str(index) for index in range(1000)]
    assert num_batches <= 10
    outbox.close()
    inbox.close()


async def test_mail_to_oneself_needs_no_wire(transport: Transport) -> None:
    inbox = transport.bind("a", SchedulerInbox)
    inbox.post(AbortRequest("mine"))
    assert await inbox.recv_batch() == [AbortRequest("mine")]
    inbox.close()


async def test_an_undecodable_frame_costs_only_itself(transport: Transport) -> None:
    inbox = transport.bind("a", SchedulerInbox)
    inbox.deliver([encode(AbortRequest("1")), b"\xc1garbage", encode(AbortRequest("2"))])
    assert await inbox.recv_batch() == [AbortRequest("1"), AbortRequest("2")]
    assert inbox.num_undecodable == 1
    inbox.close()


async def test_a_cancelled_receive_loses_nothing(transport: Transport) -> None:
    inbox = transport.bind("a", SchedulerInbox)
    waiting = asyncio.create_task(inbox.recv_batch())
    await asyncio.sleep(0.01)
    inbox.post(AbortRequest("kept"))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if waiting.cancelled():
        assert await inbox.recv_batch() == [AbortRequest("kept")]
    inbox.close()


async def test_sockets_lie_in_a_private_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    transport = UnixTransport(Settings(runtime_dir=str(run)))
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    transport.close()


async def test_a_runtime_dir_that_is_too_long_says_so(tmp_path: Path) -> None:
    transport = UnixTransport(Settings(runtime_dir=str(tmp_path / ("x" * 90))))
    with pytest.raises(ConfigError, match="too long"):
        transport.bind("scheduler", SchedulerInbox)
    transport.close()


async def test_a_stranger_gets_no_frame_through(tmp_path: Path) -> None:
    settings = Settings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    inbox = transport.bind("a", SchedulerInbox)
    keys = load_keys(settings.runtime_path)
    context = zmq.Context()
    public, secret = zmq.curve_keypair()
    plain, stranger = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
    stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = keys.server_public, public, secret
    for socket in (plain, stranger):
        socket.connect(inbox.address)
        socket.send(encode(AbortRequest("evil")))
    friend = transport.outbox()
    friend.send(inbox.address, AbortRequest("good"))
    friend.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("good")]
    await asyncio.sleep(0.3)
    inbox.post(AbortRequest("last"))
    assert await inbox.recv_batch() == [AbortRequest("last")]
    for socket in (plain, stranger):
        socket.close(linger=0)
    context.term()
    friend.close()
    inbox.close()
    transport.close()


async def test_an_inbox_follows_its_host_to_another_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ZmqTransport(Settings(transport="tcp", runtime_dir=str(tmp_path / "run")))
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    before = inbox.address
    assert before.startswith("tcp://127.0.0.1:") and not inbox.readdress()
    monkeypatch.setattr(Way, "_look", lambda _: "")
    assert not inbox.readdress() and inbox.address == before, "a host that is cut off keeps its address"
    cut_off = inbox.is_cut_off
    assert cut_off
    monkeypatch.setattr(Way, "_look", lambda _: "127.0.0.2")
    assert inbox.readdress()
    assert not inbox.is_cut_off
    assert inbox.address == before.replace("127.0.0.1", "127.0.0.2") and not inbox.readdress()
    outbox.send(inbox.address, AbortRequest("there"))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("there")]
    outbox.close()
    transport.close()


async def test_a_scheduler_s_name_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transport.zeromq.NAME_SECONDS", 0.3)
    monkeypatch.setattr("shared.transport.zeromq.NAME_POLL", 0.02)
    answers: list[str | OSError] = [OSError("not yet"), OSError("not yet"), "127.0.0.1"]

    def look_up(_: str) -> str:
        answer = answers.pop(0) if answers else OSError("never")
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("socket.gethostbyname", look_up)
    assert Way("scheduler").begin == "127.0.0.1" and not answers
    with pytest.raises(ConfigError, match="'scheduler': never"):
        Way("scheduler")


async def test_a_connection_is_made_anew_where_nothing_is_acknowledged(tmp_path: Path) -> None:
    settings = Settings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    outbox = transport.outbox()
    outbox.send("tcp://127.0.0.1:9", AbortRequest("lost"))
    outbox.flush()
    (socket,) = outbox._sockets.values()
    patience = int(1000 * settings.heartbeat_timeout)
    assert (socket.getsockopt(zmq.TCP_MAXRT), socket.getsockopt(zmq.CONNECT_TIMEOUT)) == (patience, patience)
    outbox.forget("tcp://127.0.0.1:9")
    transport.close()


async def test_a_deployment_has_one_scheduler(tmp_path: Path) -> None:
    settings = Settings(runtime_dir=str(tmp_path))
    first, second = UnixTransport(settings), UnixTransport(settings)
    first.bind("scheduler", SchedulerInbox)
    with pytest.raises(ConfigError, match="runtime_dir of its own"):
        second.bind("scheduler", SchedulerInbox)
    first.close()
    second.bind("scheduler", SchedulerInbox)
    second.close()


async def test_an_instance_s_socket_file_goes_with_it(tmp_path: Path) -> None:
    transport = UnixTransport(Settings(runtime_dir=str(tmp_path)))
    inbox = transport.bind("worker-1", SchedulerInbox)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-1.sock"]
    inbox.close()
    assert not list(tmp_path.iterdir())
    transport.close()


def test_keys_are_made_once_and_are_private(tmp_path: Path) -> None:
    first = load_keys(tmp_path)
    assert load_keys(tmp_path) == first
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_rendezvous_moves_only_what_it_must() -> None:
    members = [f"m{index}" for index in range(5)]
    before = {str(key): pick(str(key), members) for key in range(2000)}
    after = {key: pick(key, [m for m in members if m != "m3"]) for key in before}
    assert all(after[key] == owner for key, owner in before.items() if owner != "m3")
    counts = [list(before.values()).count(member) for member in members]
    assert min(counts) > 300
    assert rank("key", members)[0] == pick("key", members)
    assert pick("key", []) is None


ELSEWHERE = (
    "", "ipc://", "ipc:///var/run/other.sock", "ipc://{run}/../other.sock", "ipc://{run}/a\0b.sock", "ipc://{run}/a",
    "tcp://*:5550", "tcp://10.0.0.1", "tcp://10.0.0.1:99999999", "tcp://a b:1", "tcp://;rm:1", "inproc://x", "memory://nobody",
    "\ud800", "ipc://{run}/" + "x" * 200 + ".sock", "tcp://" + "x" * 400 + ":1",
)  # fmt: skip


@pytest.mark.parametrize("address", ELSEWHERE, ids=range(len(ELSEWHERE)))
async def test_an_address_that_is_none_of_ours_costs_only_its_mail(
    address: str, transport: Transport, tmp_path: Path
) -> None:
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    outbox.send(address.replace("{run}", str(tmp_path / "run")), AbortRequest("lost"))
    outbox.send(inbox.address, AbortRequest("kept"))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("kept")]
    outbox.close()
    inbox.close()


async def test_a_million_destinations_are_not_a_million_sockets(tmp_path: Path) -> None:
    settings = Settings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    inbox, outbox = transport.bind("a", SchedulerInbox), transport.outbox()
    for port in range(1200):
        outbox.send(f"tcp://127.0.0.1:{20000 + port}", AbortRequest("lost"))
        outbox.send(inbox.address, AbortRequest(str(port)))
        outbox.flush()
    received: list[str] = []
    while len(received) < 1200:
        received += [message.request_id for message in await asyncio.wait_for(inbox.recv_batch(), 5)]
    assert received == [str(port) for port in range(1200)]
    assert len(outbox._sockets) <= 512
    for address in list(outbox._sockets):
        outbox.forget(address)
    inbox.close()
    transport.close()


async def test_mail_for_nobody_is_thrown_away_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transport.line.PATIENCE_SECONDS", 0.2)
    outbox = UnixTransport(Settings(runtime_dir=str(tmp_path))).outbox()
    address = f"ipc://{tmp_path}/never.sock"
    outbox.send(address, AbortRequest("lost"))
    outbox.flush()
    line = outbox._lines[address]
    assert line._waiting
    async with asyncio.timeout(5):
        while line._waiting:
            await asyncio.sleep(0.02)
    assert line._retry is None or line._retry.when() < asyncio.get_running_loop().time()
    outbox.close()


LISTENER = """
import sys, time
from shared.config import Settings
from shared.messages import SchedulerInbox
from shared.transport.zeromq import ZmqTransport
import asyncio

async def main():
    transport = ZmqTransport(Settings(transport="tcp", runtime_dir=sys.argv[1], advertise_host="127.0.0.1"))
    inbox = transport.bind("a", SchedulerInbox)
    print(inbox.address, flush=True)
    while True:
        await inbox.recv_batch()
        print("heard", flush=True)

asyncio.run(main())
"""


async def test_a_process_that_ends_is_noticed_before_its_heartbeats_are_missed(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    settings = Settings(transport="tcp", runtime_dir=run, advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    listener = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LISTENER, run, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert listener.stdout is not None
    address = (await asyncio.wait_for(listener.stdout.readline(), 30)).decode().strip()
    outbox, gone = transport.outbox(), asyncio.Queue[str]()
    outbox.on_gone = gone.put_nowait
    outbox.send(address, AbortRequest("x"))
    outbox.flush()
    assert await asyncio.wait_for(listener.stdout.readline(), 10) == b"heard\n"
    await asyncio.sleep(2 * RETURN_SECONDS)
    assert gone.empty(), "nobody is taken for gone who is there"
    listener.kill()
    begun = time.monotonic()
    assert await asyncio.wait_for(gone.get(), 10) == address
    assert time.monotonic() - begun < settings.heartbeat_timeout, "or heartbeats would have told as soon"
    await listener.wait()
    outbox.forget(address)
    outbox.close()
    transport.close()


async def test_a_connection_that_is_made_anew_at_once_is_no_loss(tmp_path: Path) -> None:
    settings = Settings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1")
    transport = ZmqTransport(settings)
    inbox = transport.bind("a", SchedulerInbox)
    outbox, gone = transport.outbox(), asyncio.Queue[str]()
    outbox.on_gone = gone.put_nowait
    outbox.send(inbox.address, AbortRequest("1"))
    outbox.flush()
    assert await asyncio.wait_for(inbox.recv_batch(), 5) == [AbortRequest("1")]
    inbox.close()
    again = transport.pull_socket()
    deadline = time.monotonic() + 5
    while True:
        try:
            again.bind(inbox.address)
            break
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    outbox.send(inbox.address, AbortRequest("2"))
    outbox.flush()
    await asyncio.sleep(2 * RETURN_SECONDS)
    assert gone.empty()
    again.close()
    assert await asyncio.wait_for(gone.get(), 10) == inbox.address
    outbox.close()
    transport.close()


async def test_an_address_that_cannot_be_connected_to_leaves_nothing(tmp_path: Path) -> None:
    transport = ZmqTransport(Settings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1"))
    outbox, gone = transport.outbox(), asyncio.Queue[str]()
    outbox.on_gone = gone.put_nowait
    outbox.send("tcp://127.0.0.1:99999", AbortRequest("1"))
    outbox.flush()
    for port in range(20000, 20000 + MAX_WATCHED + 10):
        outbox.send(f"tcp://127.0.0.1:{port}", AbortRequest("1"))
    outbox.flush()
    assert len(outbox._watches) == MAX_WATCHED
    outbox.close()
    transport.close()
    assert gone.empty(), "who was never reached has not left"


async def test_the_keys_of_a_running_deployment_are_put_back(tmp_path: Path) -> None:
    now, directory = [100.0], tmp_path / "run"
    keys = load_keys(directory)
    scheduler, member = (KeyFile(directory, keys, clock=lambda: now[0]) for _ in range(2))
    scheduler.is_schedulers = True
    assert (scheduler.keep(), member.keep()) == ("", "")
    shutil.rmtree(directory)
    assert member.keep() == "its keys" and load_keys(directory) == keys
    shutil.rmtree(directory)
    others = load_keys(directory)  # of a process that started just then
    newcomer = KeyFile(directory, others, clock=lambda: now[0])
    assert member.keep() == "", "the scheduler sees to it"
    assert scheduler.keep() == "its keys" and load_keys(directory) == keys
    assert newcomer.keep() == ""
    now[0] += 6
    with pytest.raises(FatalError, match="other keys"):
        newcomer.keep()
    assert (scheduler.keep(), member.keep()) == ("", "")
    shutil.rmtree(directory)
    load_keys(directory)
    with pytest.raises(ConfigError, match="another deployment"):
        scheduler.keep()


async def test_whoever_speaks_over_tcp_keeps_the_keys_in_place(tmp_path: Path) -> None:
    transport = ZmqTransport(Settings(transport="tcp", runtime_dir=str(tmp_path / "run"), advertise_host="127.0.0.1"))
    keys = load_keys(tmp_path / "run")
    assert transport.keep() == ""
    shutil.rmtree(tmp_path / "run")
    assert transport.keep() == "its keys" and load_keys(tmp_path / "run") == keys
    transport.close()


async def test_a_stranger_over_tcp_holds_a_descriptor_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "HANDSHAKE_MS", 200)
    transport = ZmqTransport(Settings(transport="tcp", runtime_dir=str(tmp_path), advertise_host="127.0.0.1"))
    inbox = transport.bind("a", SchedulerInbox)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(inbox.address.rpartition(":")[2]))
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    writer.close()
    transport.close()
