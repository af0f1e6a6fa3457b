"""How ranks that compute with torch come together: as all ranks do (`engine.loading.ranks`), then by torch.distributed.

The leader opens a port, and says over its links which; there each rank leaves the address of its own sockets.  What
passes these is not authenticated or encrypted, and every rank listens at the address by which it is linked to the
leader: this host's own where all ranks are on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from engine.description.ranks import PANEL, Place, widths
from engine.description.spec import AttentionSpec, ModelSpec
from engine.loading.backend import Backend
from engine.loading.memory import MemoryPlan
from engine.loading.ranks import Ranks, settle
from engine.modeling.ranks.collectives import CollectiveBackend
from engine.modeling.ranks.rank_assembly import build_torch_rank
from engine.modeling.ranks.rank_links import FollowingLink, LeadingLinks, MeetingOrder
from engine.modeling.ranks.torch_ranks import FollowingTorchRank, LeadingTorchRank, TorchRankDecoder
from engine.weights.part_source import RankSource
from engine.weights.source import WeightSource
from kernels.cpu.linear import columns_are_alone
from shared.config import EngineSettings
from shared.errors import ConfigError, FatalError
from shared.messages.fingerprint import Fingerprint

MEETING = timedelta(seconds=60)  # that all ranks have to meet, once all have loaded
LOOK_EVERY = 0.1  # seconds, for ranks that have ended meanwhile
distributed: Any = torch.distributed  # whose stubs lack what is used here
SLOWEST = timedelta(minutes=30)  # that a rank waits for another one, which lives, within a step


def why_not_reduced(backend: Backend) -> str:
    """What keeps a model's linears from being added up; empty where nothing does."""
    if backend.formats.quantised or backend.formats.keeps_codes:
        return "tensor_parallel_reduce is for weights in 16 or 32 bits; leave it out, or set quantization=none"
    return ""


def build_torch_part(
    settings: EngineSettings,
    place: Place,
    backend: Backend,
    spec: ModelSpec,
    source: WeightSource,
    *,
    max_positions: int,
    reads_all: bool,
) -> TorchRankDecoder:
    """A rank's part of the model.  `reads_all`: a digest of the whole checkpoint is wanted.

    Raises ConfigError where the host has fewer GPUs than ranks, or weights cannot be added up.
    """
    if backend.device.type == "cuda" and place.leads and (found := torch.cuda.device_count()) < settings.ranks_here:
        raise ConfigError(
            f"tensor_parallel_size is {place.ranks}, but this host has {found} GPUs, of which each rank needs one"
        )
    if settings.tensor_parallel_reduce and (why := why_not_reduced(backend)):
        raise ConfigError(why)
    place = dataclasses.replace(place, reduces=settings.tensor_parallel_reduce)
    part = RankSource(source, spec, place)
    model = build_torch_rank(
        spec,
        place,
        part,
        backend.formats,
        backend.kernels,
        backend.device,
        max_positions=max_positions,
        dual_batch_threshold=settings.dbo_token_threshold if settings.enable_dbo else 0,
    )
    if reads_all:
        part.read_others()
    return model


def class_of_ranks(settings: EngineSettings, backend: Backend, spec: ModelSpec) -> str:
    """What ranks change of a numeric class; empty where their bits are those of one process, which is checked here."""
    count = settings.tensor_parallel_size
    if not settings.has_torch_ranks:
        return ""
    if settings.tensor_parallel_reduce:
        return f", reduced by {count} ranks"
    is_alone = backend.device.type == "cpu" and settings.batch_invariant
    if is_alone and backend.formats.compute != torch.float16 and _columns_are_alone(spec, Place(0, count)):
        return ""
    return f", {count} ranks"


def _columns_are_alone(spec: ModelSpec, place: Place) -> bool:
    """Of all linears of a model, without its head, whose features are like those of the others."""
    checked: set[tuple[int, tuple[int, ...]]] = set()
    hidden = widths(place, spec.hidden_size, PANEL)
    for layer in spec.layers:
        heads = layer.attention
        assert isinstance(heads, AttentionSpec)
        size = heads.head_dim * (heads.group + 2)  # queries, keys and values lie in one matrix
        checked.add((spec.hidden_size, widths(place, heads.num_kv_heads, size=size)))
        checked.add((heads.num_heads * heads.head_dim, hidden))
        times = 2 if layer.mlp.gated else 1
        checked.add((spec.hidden_size, tuple(times * one for one in widths(place, layer.mlp.inner, PANEL))))
        checked.add((layer.mlp.inner, hidden))
    return all(columns_are_alone(*one) for one in checked)


def join_torch(
    ranks: Ranks, part: TorchRankDecoder, plan: MemoryPlan, fingerprint: Fingerprint
) -> tuple[TorchRankDecoder, MemoryPlan]:
    """The rank's model, and the plan that all ranks go by.

    Raises ConfigError and FatalError as `Ranks.settle`, and FatalError where a rank does not come to the meeting.
    """
    start, plan = settle(ranks, plan, fingerprint)
    model: LeadingTorchRank | FollowingTorchRank
    try:
        if ranks.place.leads:
            model = _lead(ranks.links, part, start.digest)
        else:
            model = _follow(ranks.links[0], part, start.digest, plan)
    except (OSError, RuntimeError) as error:  # torch's own errors of sockets and stores are RuntimeErrors
        raise FatalError(f"the ranks have not met: {error}") from error
    ranks.joined(model)
    return model, plan


def _lead(links: Sequence[int], part: TorchRankDecoder, agreed: int) -> LeadingTorchRank:
    leading, place = LeadingLinks(links, agreed), part.collectives.place
    listener = socket.create_server((leading.host, 0))
    port = int(listener.getsockname()[1])
    store = distributed.TCPStore(
        leading.host, port, place.ranks, True, MEETING, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    leading.send(MeetingOrder(port))
    part.collectives.connect(meet(links, partial(make_backend, store, place, part.device, leading.host)))
    return LeadingTorchRank(part, leading)


def _follow(link: int, part: TorchRankDecoder, agreed: int, plan: MemoryPlan) -> FollowingTorchRank:
    following, place = FollowingLink(link, agreed), part.collectives.place
    meeting = following.receive()
    if not isinstance(meeting, MeetingOrder):
        raise FatalError("the leader does not say where ranks meet")
    own, leader = following.hosts
    store = distributed.TCPStore(leader, meeting.port, place.ranks, False, MEETING, wait_for_workers=False)
    part.collectives.connect(meet([link], partial(make_backend, store, place, part.device, own)))
    return FollowingTorchRank(part, following, max_seqs=plan.states.num_rows, longest=plan.max_model_len)


def meet(links: Sequence[int], make: Callable[[], CollectiveBackend]) -> CollectiveBackend:
    """What `make` gives, once all ranks have come to it.  `links`: descriptors of sockets to those that it takes.

    torch waits for them by a clock of its own and cannot be told to give up: so it waits in a thread, which is left
    behind where a link is closed meanwhile.  Raises FatalError then, and whatever `make` raises.
    """
    done: queue.SimpleQueue[CollectiveBackend | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(make())
        except BaseException as error:
            done.put(error)

    closed = select.poll()
    for link in links:
        closed.register(link, select.POLLRDHUP)
    threading.Thread(target=run, name="meeting", daemon=True).start()
    while not closed.poll(0):
        with contextlib.suppress(queue.Empty):
            found = done.get(timeout=LOOK_EVERY)
            if isinstance(found, BaseException):
                raise found
            return found
    raise FatalError("a rank has ended before all have met")


def make_backend(store: Any, place: Place, device: torch.device, host: str) -> CollectiveBackend:
    """NCCL between GPUs, gloo between CPUs; `host`: the address at which this rank listens.  Raises RuntimeError."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # this thread's
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = MEETING
        made: CollectiveBackend = distributed.ProcessGroupNCCL(store, place.rank, place.ranks, options)
    else:
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout, options._threads = MEETING, 2
        made = gloo(store, place.rank, place.ranks, options)
    made._set_default_timeout(SLOWEST)
    return made
