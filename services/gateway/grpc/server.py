"""The gRPC server: what it serves, its limits, and its health as the standard service reports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.pageant.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from services.gateway.access.auth import Access
from services.gateway.access.connections import make_connections
from services.gateway.access.intake import BodyIntake
from services.gateway.generation.models import ServedModels
from services.gateway.grpc.interceptors import Arrivals, KeyInterceptor
from services.gateway.grpc.listening import stop_listening
from services.gateway.grpc.load_service import LoadService
from services.gateway.grpc.peers import PeerWatch
from services.gateway.grpc.receiving import ReceivingInterceptor
from services.gateway.grpc.servicer import ControlServicer, InferenceServicer
from shared.config import AccessSettings, GatewaySettings
from shared.errors import ConfigError
from shared.exposure import KEYS_ADVICE

log = structlog.get_logger()

MAX_METADATA_BYTES = 16 << 10
MAX_PENDING = (
    1 << 15
)  # calls that came at once: beyond some of them gRPC cancels at random and without a status; we refuse
FIRST_CALL = 0.1  # seconds in which a connection that was just made sends its first call, on a busy machine too
LULL, AT_MOST = 0.02, 2.0  # seconds without a new call before the server stops; but it does not wait for ever
GRACE = 0.5  # seconds between the last answer and the closing of connections

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True, slots=True)
class Servicers:
    """The services that a server has of its own, beside health and reflection."""

    inference: InferenceServicer
    control: ControlServicer
    load: LoadService


class FrontServer:
    """One grpc.aio server; every call passes `access` and `intake` before a servicer has it."""

    def __init__(
        self, servicers: Servicers, access: Access, intake: BodyIntake, models: ServedModels,
        settings: GatewaySettings, access_settings: AccessSettings,
    ) -> None:  # fmt: skip
        self._servicers = servicers
        self._access = access
        self._intake = intake
        self._models = models
        self._reported: dict[str, bool] = {}  # by the names of models, whether they are said to serve
        self._settings = settings
        self._access_settings = access_settings
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack aio
        self._arrivals = Arrivals()
        self._connections = make_connections(settings)
        self._server: grpc.aio.Server
        self.port = 0

    async def start(self) -> None:
        """Listen; raises ConfigError where the port is taken."""
        self._server = grpc.aio.server(
            interceptors=[
                self._arrivals,
                KeyInterceptor(self._access),
                ReceivingInterceptor(self._intake, self._access, self._settings.max_request_bytes),
            ],
            options=server_options(self._settings, self._connections.most),
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(self._servicers.inference, self._server)
        control_pb2_grpc.add_ControlServicer_to_server(self._servicers.control, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((self._servicers.load.handler,))
        reflection.enable_server_reflection((INFERENCE, CONTROL, HEALTH, reflection.SERVICE_NAME), self._server)
        address = authority(self._settings.host, self._settings.port)
        credentials = server_credentials(self._access_settings)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        await self._report(serving=False)
        await self._health.set(CONTROL, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        log.info(
            "listening",
            address=authority(self._settings.host, self.port),
            tls=credentials is not None,
            keys="none: every client that reaches the port may ask" if self._access.is_open else "needed",
        )
        if self._access_settings.is_open_to_others(self._settings.host):
            log.warning("no_api_keys", host=self._settings.host, advice=KEYS_ADVICE)

    async def hand_over(self, seconds: float) -> None:
        """Leave the port to the gateways that share it, if there are any: new calls go there, open ones have `seconds`
        to end.  Waits for the first calls of the connections that were just made, and stops.

        A call that has come to gRPC's core, which hands them over one by one, and not to us, is cancelled when its
        server stops, and its client does not learn that it might ask again: so it stops in a moment without any.
        """
        stop_listening(self.port)
        await self._arrivals.until_none(FIRST_CALL, AT_MOST)
        await self._arrivals.until_none(LULL, AT_MOST)
        await self._server.stop(seconds)

    async def stop(self) -> None:
        """Refuse new calls, send the last answers, close."""
        await self._health.enter_graceful_shutdown()
        await self.hand_over(GRACE)

    async def watch_peers(self) -> None:
        """See to it that no address has more than its share of the connections, as long as the process lives."""
        await PeerWatch(self.port, self._connections.per_address).run()

    async def follow_health(self) -> None:
        """Keep the health service's statuses the same as the models' readiness, as long as the process lives; of models
        beside the first they follow within a tick."""
        readiness = self._models.first.readiness
        unwell: str | None = None
        while True:
            await self._report_models()
            if (now := readiness.unwell) != unwell:
                unwell = now
                log.info("serving" if not unwell else "not_serving", reason=unwell)
                await self._report(serving=not unwell)
            else:
                await readiness.changed()

    async def _report_models(self) -> None:
        """By each name of each model; one that was removed is unknown."""
        word = health_pb2.HealthCheckResponse
        serving = {name: not service.readiness.unwell for service in self._models for name in service.names}
        for name in self._reported.keys() - serving.keys():
            await self._health.set(name, word.SERVICE_UNKNOWN)
        for name, is_serving in serving.items():
            if self._reported.get(name) is not is_serving:
                await self._health.set(name, word.SERVING if is_serving else word.NOT_SERVING)
        self._reported = serving

    async def _report(self, *, serving: bool) -> None:
        word = health_pb2.HealthCheckResponse
        for name in ("", INFERENCE):
            await self._health.set(name, word.SERVING if serving else word.NOT_SERVING)


def authority(host: str, port: int) -> str:
    """A host with a port.  An address of IPv6 is in brackets there, with which it may be given already."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def server_options(settings: GatewaySettings, most: int) -> list[tuple[str, Any]]:
    """Limits, pings that find a client that vanished without closing, and connections: how many there may be (`most`),
    and how long one may be there without a handshake or without a call."""
    return [
        ("grpc.so_reuseport", int(settings.share_port)),  # servers on one port share its clients at random
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.server_handshake_timeout_ms", int(1000 * settings.header_timeout)),
        ("grpc.max_connection_idle_ms", int(1000 * settings.idle_timeout)),
    ]


def server_credentials(settings: AccessSettings) -> Any:
    """What the gRPC server shows and asks for; None where the settings name no certificate.

    Raises ConfigError where a file cannot be read or is no PEM.
    """
    if not settings.tls_cert_file:
        return None
    pair = (read_pem(settings.tls_key_file, "tls_key_file"), read_pem(settings.tls_cert_file, "tls_cert_file"))
    authority = read_pem(settings.tls_client_ca_file, "tls_client_ca_file") if settings.tls_client_ca_file else None
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


def read_pem(path: str, setting: str) -> bytes:
    """A PEM file's bytes; raises ConfigError naming the setting."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{setting} {path} is not a PEM file")
    return content
