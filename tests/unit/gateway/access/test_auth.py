"""Keys and certificates: who gets in, as whom, and what those who do not are told."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.pageant.v1 import control_pb2, inference_pb2
from protos.pageant.v1.inference_pb2_grpc import InferenceStub
from services.gateway.access.auth import OPERATOR, Access, ApiKeys, make_access, shown_key
from services.gateway.access.header import cache_salt
from shared.config import Settings, load_settings
from shared.errors import ConfigError, RejectCode, RequestError
from tests.unit.gateway.troupe import LAST, Front, failure, front

KEYS = f"acme:acme-key-1, acme:acme-key-2, beta:beta-key-1, {OPERATOR}:operator-key, lone-key-0"
ACME = (("authorization", "Bearer acme-key-1"),)
BETA = (("x-api-key", "beta-key-1"),)


def access(**settings: str) -> Access:
    return make_access(load_settings(settings, environ={}).access)


def code_of(access: Access, *headers: tuple[str, str | bytes]) -> RejectCode:
    with pytest.raises(RequestError) as refused:
        access.caller(headers)
    assert "acme-key" not in str(refused.value) and "wrong" not in str(refused.value)
    return refused.value.code


def test_the_tenant_is_the_keys_whatever_the_client_says() -> None:
    opened = access(api_keys=KEYS)
    for key in ("acme-key-1", "acme-key-2"):
        assert opened.caller([("x-tenant", "beta"), ("Authorization", f"bearer {key}")]).tenant == "acme"
    assert opened.caller(BETA).tenant == "beta"
    lone = opened.caller([("x-api-key", "lone-key-0")]).tenant
    assert lone.startswith("key-") and "lone" not in lone


def test_no_key_and_a_wrong_one_are_unauthenticated() -> None:
    opened = access(api_keys=KEYS)
    wrong = ("wrong-key", "acme-key-", "acme-key-11", "", " ", "\ud800", "x" * 100_000, "acme:acme-key-1")
    for key in wrong:
        assert code_of(opened, ("authorization", f"Bearer {key}")) is RejectCode.UNAUTHENTICATED
        assert code_of(opened, ("x-api-key", key)) is RejectCode.UNAUTHENTICATED
    assert code_of(opened) is RejectCode.UNAUTHENTICATED
    assert code_of(opened, ("authorization", "Basic acme-key-1")) is RejectCode.UNAUTHENTICATED
    assert code_of(opened, ("authorization-bin", b"Bearer acme-key-1")) is RejectCode.UNAUTHENTICATED


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, shown: bytes) -> bool:
        compared.append(known)
        return known == shown

    monkeypatch.setattr("services.gateway.access.auth.hmac.compare_digest", compare)
    keys = ApiKeys([("a", "first-key"), ("b", "second-key"), ("c", "third-key")])
    for key, tenant in (("first-key", "a"), ("third-key", "c"), ("no-such-key", None)):
        compared.clear()
        assert keys.tenant_of(key) == tenant
        assert len(compared) == 3


def test_without_keys_everybody_is_who_they_say() -> None:
    opened = access()
    assert opened.is_open
    assert opened.caller([("x-tenant", "acme")]).tenant == "acme"
    assert code_of(opened, ("x-tenant", "x" * 129)) is RejectCode.INVALID_ARGUMENT


def test_keys_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nacme:acme-key-1\n  beta-key-1  \n", encoding="utf-8")
    opened = access(api_keys_file=str(file), api_keys="more:further-key")
    assert {opened.caller([("x-api-key", key)]).tenant for key in ("acme-key-1", "further-key")} == {"acme", "more"}


@pytest.mark.parametrize(
    "entry",
    ["acme:short", "acme:", ":long-enough-key", "acme:has a space", "acme:k\u00e9y-k\u00e9y-k\u00e9y", "#only", " , "],
)
def test_what_is_no_key_is_a_start_up_error_that_does_not_repeat_it(entry: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        access(api_keys=entry)
    assert "api_keys" in str(wrong.value)
    assert entry.partition(":")[2] not in str(wrong.value) or not entry.partition(":")[2]


def test_a_missing_file_and_a_key_of_two_tenants_are_start_up_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        access(api_keys_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="twice"):
        access(api_keys="a:the-same-key,b:the-same-key")


def test_where_a_key_is_looked_for() -> None:
    assert shown_key([("Authorization", "Bearer  k ")]) == "k"
    assert shown_key([("X-Api-Key", "k")]) == "k"
    assert shown_key([("cookie", "k")]) is None


async def test_every_method_of_grpc_needs_a_key_but_health() -> None:
    async with front(api_keys=KEYS) as f:
        calls: list[Any] = [
            f.inference.Generate(inference_pb2.GenerateRequest(text="x")),
            f.inference.Tokenize(inference_pb2.TokenizeRequest(text="x")),
            f.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1])),
            f.inference.ListModels(inference_pb2.ListModelsRequest()),
            f.control.GetLoad(control_pb2.GetLoadRequest()),
            f.control.Abort(control_pb2.AbortRequest(label="x")),
            f.control.Drain(control_pb2.DrainRequest()),
        ]
        for call in calls:
            error = await failure(call)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "API key" in error.details()
        answer = await health_pb2_grpc.HealthStub(f.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == answer.SERVING
        assert not len(f.troupe.gateway.generation.journal)


async def test_salt_and_tenant_of_a_request_come_from_its_key() -> None:
    async with front(api_keys=KEYS) as f:
        ask = inference_pb2.GenerateRequest(text="x")
        call = f.inference.Generate(ask, metadata=(("x-tenant", "beta"), ("x-cache-salt", "mine"), *ACME))
        header = (await f.troupe.request()).header
        assert (header.tenant, header.cache_salt) == ("acme", cache_salt("acme"))
        assert cache_salt("acme") != cache_salt("beta") and "acme" not in header.cache_salt
        call.cancel()


async def test_a_tenant_aborts_only_its_own_and_only_the_operator_drains() -> None:
    async with front(api_keys=KEYS) as f:
        call = f.inference.Generate(inference_pb2.GenerateRequest(text="x", label="job"), metadata=ACME)
        request = await f.troupe.request()
        for target in ({"request_id": request.header.request_id}, {"label": "job"}):
            answer = await f.control.Abort(control_pb2.AbortRequest(**target), metadata=BETA)
            assert answer.num_aborted == 0
        error = await failure(f.control.Drain(control_pb2.DrainRequest(timeout=0.01), metadata=ACME))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        f.troupe.say(request, "on", **LAST)
        assert (await call.read()).text == "on"
        answer = await f.control.Drain(
            control_pb2.DrainRequest(timeout=0.01), metadata=(("x-api-key", "operator-key"),)
        )
        assert answer.num_open_streams <= 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


async def test_tls_is_spoken_where_a_certificate_is_configured(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    async with front(tls_cert_file=cert, tls_key_file=key, api_keys=KEYS) as f:
        address = f"127.0.0.1:{f.troupe.gateway.server.port}"
        trusting = grpc.ssl_channel_credentials(Path(cert).read_bytes())
        async with grpc.aio.secure_channel(address, trusting) as channel:
            call = Front(f.troupe, channel).inference.Generate(inference_pb2.GenerateRequest(text="x"), metadata=ACME)
            f.troupe.say(await f.troupe.request(), "secret", **LAST)
            assert (await call.read()).text == "secret"
        ask = inference_pb2.ListModelsRequest()
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials()) as channel:
            stub: Any = InferenceStub(channel)
            assert (await failure(stub.ListModels(ask, metadata=ACME))).code() is grpc.StatusCode.UNAVAILABLE
        plain = await failure(f.inference.ListModels(ask, metadata=ACME))
        assert plain.code() is grpc.StatusCode.UNAVAILABLE


async def test_clients_must_show_a_certificate_where_an_authority_is_configured(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    async with front(tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=cert) as f:
        address = f"127.0.0.1:{f.troupe.gateway.server.port}"
        root, pair = Path(cert).read_bytes(), (Path(key).read_bytes(), Path(cert).read_bytes())
        ask = inference_pb2.ListModelsRequest()
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root, *pair)) as channel:
            stub: Any = InferenceStub(channel)
            assert len((await stub.ListModels(ask)).models) == 1
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root)) as channel:
            stub = InferenceStub(channel)
            assert (await failure(stub.ListModels(ask))).code() is grpc.StatusCode.UNAVAILABLE


def test_tls_settings_that_cannot_work_say_which(tmp_path: Path) -> None:
    from services.gateway.grpc.server import server_credentials

    with pytest.raises(ConfigError, match="together"):
        load_settings({"tls_cert_file": "c"}, environ={})
    with pytest.raises(ConfigError, match="needs tls_cert_file"):
        load_settings({"tls_client_ca_file": "c"}, environ={})
    settings = Settings.of(tls_cert_file=str(tmp_path / "c"), tls_key_file=str(tmp_path / "k"))
    with pytest.raises(ConfigError, match=r"tls_key_file .* cannot be read"):
        server_credentials(settings.access)
    (tmp_path / "k").write_text("no pem")
    with pytest.raises(ConfigError, match=r"tls_key_file .* is not a PEM file"):
        server_credentials(msgspec.structs.replace(settings).access)
