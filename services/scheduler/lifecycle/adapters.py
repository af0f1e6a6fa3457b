"""Which adapters requests may name, and the loads and unloads that are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.scheduler.lifecycle.outputs import Outbound
from services.scheduler.state.replica import Replica
from services.scheduler.state.sequence import Request, Sequence
from shared.errors import RejectCode, RequestError
from shared.messages import Adapter, AdapterLoaded, AdaptersHeld, Hello, HoldAdapters, LoadAdapter, UnloadAdapter

MAX_COUNTED = 64  # adapters whose requests are counted by name
OTHERS = "others"


@dataclass(slots=True)
class _Load:
    message: LoadAdapter
    worker: str = ""  # that reads it
    epoch: int = -1  # of that worker's link: with another one it knows nothing of the load


class Adapters:
    """A deployment's adapters by name.  Requests carry theirs, name, digest and path, so that nothing here has to
    outlive a scheduler but the names, which the gateways tell the next one.

    A request holds on to the content that its name had when it came: a name that gets another content, or is
    forgotten, changes nothing for it.
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        requests: Mapping[str, Request],
        outbound: Outbound,
        fail: Callable[[Request, RequestError], None],
    ) -> None:
        self.known: dict[str, Adapter] = {}
        self.version = 0  # how often `known` has changed
        self._replicas = replicas
        self._requests = requests
        self._outbound = outbound
        self._fail = fail
        self._answers: list[tuple[str, AdapterLoaded]] = []
        self._loads: list[_Load] = []
        self._unloads: list[tuple[UnloadAdapter, Adapter]] = []

    # -- names

    def learn(self, message: Hello) -> None:
        """What a gateway knows from an earlier life; a name that is known here stays as it is."""
        for adapter in message.adapters:
            if adapter.name not in self.known:
                self._name(adapter)

    def _name(self, adapter: Adapter) -> None:
        before = self.known.get(adapter.name)
        if before != adapter:
            self.known[adapter.name] = adapter
            self.version += 1
        if before is not None and before.digest != adapter.digest:
            self._abandon(before.digest)

    def _abandon(self, digest: str) -> None:
        """No name stands for it any more: workers drop it once no request uses it."""
        if all(adapter.digest != digest for adapter in self.known.values()):
            for replica in self._replicas.values():
                replica.adapters.give_up(digest)

    def loads(self) -> dict[str, int]:
        """Open requests by adapter: of so many names at most, so that names without end make no series without end."""
        names = sorted(self.known)[:MAX_COUNTED]
        counts = dict.fromkeys(names, 0)
        for request in self._requests.values():
            if (adapter := request.header.adapter) is not None:
                name = adapter.name if adapter.name in counts else OTHERS
                counts[name] = counts.get(name, 0) + 1
        return counts

    # -- orders of operators

    def load(self, message: LoadAdapter) -> None:
        if any(replica.adapters.max_loras for replica in self._replicas.values()):
            self._loads.append(_Load(message))
            return
        error = RequestError("no worker is ready", code=RejectCode.UNAVAILABLE)
        if self._replicas:
            error = RequestError("max_loras is 0: no adapters are served", field="model")
        self._outbound.reject(message.gateway, message.request_id, error)

    def unload(self, message: UnloadAdapter) -> None:
        adapter = self.known.pop(message.name, None)
        if adapter is None:
            error = RequestError(f"no adapter {message.name!r} is loaded", field="lora_name", code=RejectCode.NOT_FOUND)
            self._outbound.reject(message.gateway, message.request_id, error)
            return
        self.version += 1
        self._abandon(adapter.digest)
        self._unloads.append((message, adapter))

    # -- workers

    @property
    def has_orders(self) -> bool:
        """Whether `take_orders` has something to do."""
        loads = not all(map(self._is_assigned, self._loads)) and bool(self._replicas)
        return loads or bool(self._unloads) or any(one.adapters.has_orders for one in self._replicas.values())

    def take_orders(self) -> list[tuple[str, HoldAdapters]]:
        """By worker, what to send now."""
        in_use = self._in_use()
        self._assign_loads()
        self._answer_unloads(in_use)
        orders = []
        for instance, replica in self._replicas.items():
            if replica.adapters.has_orders:
                order = replica.adapters.order(replica.epoch, in_use.get(instance, set()))
                if order is not None:
                    orders.append((instance, order))
        return orders

    def _in_use(self) -> dict[str, set[str]]:
        """Digests by worker, of sequences that wait or run there or are in a step that was not answered."""
        found: dict[str, set[str]] = {}
        for instance, replica in self._replicas.items():
            steps = (sequence for step in replica.in_flight for sequence in step.sequences)
            everything: Iterable[Sequence] = (*replica.running, *_keeping(replica), *steps)
            found[instance] = {one.request.adapter for one in everything if one.request.adapter}
        return found

    def _is_assigned(self, load: _Load) -> bool:
        """Whether a worker was told of it, which is there still, with the same link."""
        replica = self._replicas.get(load.worker)
        return replica is not None and replica.epoch == load.epoch

    def _assign_loads(self) -> None:
        """A load goes to the worker that is to hold the fewest."""
        able = {name: replica for name, replica in self._replicas.items() if replica.adapters.max_loras}
        for load in self._loads:
            if able and not self._is_assigned(load):
                load.worker = min(able, key=lambda name: able[name].adapters.num_to_hold)
                load.epoch = able[load.worker].epoch
                able[load.worker].adapters.want(Adapter(load.message.name, path=load.message.path))

    def _answer_unloads(self, in_use: Mapping[str, set[str]]) -> None:
        alive = {request.adapter for request in self._requests.values()}.union(*in_use.values())
        waiting = []
        for message, adapter in self._unloads:
            if adapter.digest in alive:
                waiting.append((message, adapter))
            else:
                self._answers.append((message.gateway, AdapterLoaded(message.request_id, adapter)))
        self._unloads = waiting

    def take_answers(self) -> list[tuple[str, AdapterLoaded]]:
        """By gateway, since the last call; refusals go where all do."""
        taken, self._answers = self._answers, []
        return taken

    def held(self, message: AdaptersHeld) -> None:
        """A worker's answer; one of another life is dropped."""
        replica = next((one for one in self._replicas.values() if one.epoch == message.epoch), None)
        if replica is None:
            return
        came, failed = replica.adapters.answered(message)
        for adapter in came:
            for load in self._loads_of(replica, adapter.path):
                named = Adapter(load.message.name, adapter.digest, adapter.path)
                self._name(named)
                self._answers.append((load.message.gateway, AdapterLoaded(load.message.request_id, named)))
        for failure in failed:
            if failure.adapter.digest:
                self._fail_requests(replica, failure.adapter.digest, failure.reason)
                continue
            error = RequestError(failure.reason, field="model")
            for load in self._loads_of(replica, failure.adapter.path):
                self._outbound.reject(load.message.gateway, load.message.request_id, error)

    def _loads_of(self, replica: Replica, path: str) -> list[_Load]:
        """Those that this answers, which are over then."""
        found = [one for one in self._loads if one.worker == replica.instance and one.message.path == path]
        self._loads = [load for load in self._loads if load not in found]
        return found

    def _fail_requests(self, replica: Replica, digest: str, reason: str) -> None:
        """Requests that wait there for what cannot be loaded again, as its files have changed."""
        for request in dict.fromkeys(one.request for one in replica.waiting if one.request.adapter == digest):
            name = request.header.adapter.name if request.header.adapter is not None else ""
            text = f"adapter {name!r} cannot be loaded again: {reason}"
            self._fail(request, RequestError(text, field="model", code=RejectCode.NOT_FOUND))


def _keeping(replica: Replica) -> list[Sequence]:
    """The waiting ones whose adapters stay at the worker.

    Not those of the background where others are, which these wait for; and none that comes behind one whose adapter
    waits for room: else adapters that are always asked for would keep the others out for ever.
    """
    rests = replica.has_foreground
    waiting = [sequence for sequence in replica.waiting if not (rests and sequence.is_background)]
    kept_out = (one.rank for one in waiting if replica.adapters.waits_for_room(one.request.adapter))
    first = min(kept_out, default=None)
    return [one for one in waiting if first is None or one.rank <= first]
