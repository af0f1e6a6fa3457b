"""The keys of clients, and the tenant that each stands for.

Knows no transport: every front shows it a call's headers, under the same names.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.gateway.access.connections import source_of
from services.gateway.access.header import CallMetadata, read_metadata
from shared.config import AccessSettings
from shared.errors import ConfigError, RejectCode, RequestError

OPERATOR = "operator"  # the tenant whose keys may look after the gateway too
MIN_KEY_CHARS = 8
MAX_KEY_CHARS = 512
MAX_TENANT_CHARS = 128  # it is in every log line of its requests
BEARER = "bearer "

Headers = Iterable[tuple[str, str | bytes]]


class ApiKeys:
    """The keys that open a deployment; only their digests are kept."""

    def __init__(self, entries: Iterable[tuple[str, str]]) -> None:
        self._tenants = [(digest(key), tenant) for tenant, key in entries]
        if len({known for known, _ in self._tenants}) < len(self._tenants):
            raise ConfigError("api_keys has the same key twice")

    def tenant_of(self, key: str) -> str | None:
        """Compares with all of them, so that its duration reveals nothing about any."""
        shown, found = digest(key), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, shown):
                found = tenant
        return found


class Access:
    """Admits calls: with `keys` those that show a valid one, as its tenant; else all, as the tenant that they name."""

    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys

    @property
    def is_open(self) -> bool:
        return self._keys is None

    def caller(self, headers: Headers) -> CallMetadata:
        """The caller.  Raises RequestError where no valid key is shown, or the tenant's name is too long."""
        headers = list(headers)
        call = read_metadata(headers)
        if self._keys is not None:
            return msgspec.structs.replace(call, tenant=self._tenant(self._keys, headers))
        if len(call.tenant) > MAX_TENANT_CHARS:
            raise RequestError(
                f"x-tenant has {len(call.tenant)} characters, more than {MAX_TENANT_CHARS}", field="x-tenant"
            )
        return call

    def sender(self, headers: Headers, host: str) -> str:
        """The account that pays for a request: the tenant where a key names it, else the address, with the tenant that
        the call names where there are no keys.  Never raises."""
        headers = list(headers)
        if self._keys is None:
            return f"{source_of(host)} {read_metadata(headers).tenant[:MAX_TENANT_CHARS]}"
        key = shown_key(headers)
        tenant = self._keys.tenant_of(key) if key is not None else None
        return f"address {source_of(host)}" if tenant is None else f"tenant {tenant}"

    def check_operator(self, call: CallMetadata) -> None:
        """Raise RequestError unless the caller may look after the gateway."""
        if not self.is_open and call.tenant != OPERATOR:
            raise RequestError(f"only a key of the tenant {OPERATOR!r} may do this", code=RejectCode.PERMISSION_DENIED)

    def _tenant(self, keys: ApiKeys, headers: Headers) -> str:
        key = shown_key(headers)
        if key is None:
            raise _unauthenticated("an API key is needed: send it as `authorization: Bearer KEY`, or as `x-api-key`")
        tenant = keys.tenant_of(key)
        if tenant is None:
            raise _unauthenticated("the API key is not valid")
        return tenant


def shown_key(headers: Headers) -> str | None:
    """The key in a call's headers, if there is one; never longer than a key may be."""
    found = {name.lower(): value for name, value in headers if isinstance(value, str)}
    authorization = found.get("authorization", "")
    if authorization[: len(BEARER)].lower() == BEARER:
        key: str | None = authorization[len(BEARER) :].strip()
    else:
        key = found.get("x-api-key")
    return key[: MAX_KEY_CHARS + 1] if key else None


def make_access(settings: AccessSettings) -> Access:
    """The settings' keys.  Raises ConfigError where they cannot be read; what is wrong is never repeated in words."""
    if not (settings.api_keys or settings.api_keys_file):
        return Access(None)
    lines = settings.api_keys.replace(",", "\n").splitlines()
    if settings.api_keys_file:
        try:
            lines += Path(settings.api_keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"api_keys_file {settings.api_keys_file} cannot be read: {type(error).__name__}"
            ) from None
    entries = [entry for line in lines if (entry := line.strip()) and not entry.startswith("#")]
    if not entries:
        raise ConfigError("api_keys and api_keys_file hold no key")
    return Access(ApiKeys(read_entry(entry, number) for number, entry in enumerate(entries, 1)))


def read_entry(entry: str, number: int) -> tuple[str, str]:
    """(tenant, key) of `tenant:key`; a key alone is a tenant of its own, whose name does not give it away."""
    tenant, colon, key = (part.strip() for part in entry.partition(":"))
    if not colon:
        tenant, key = f"key-{digest(entry).hex()[:8]}", entry
    if not (0 < len(tenant) <= MAX_TENANT_CHARS and tenant.isprintable()):
        raise ConfigError(f"entry {number} of api_keys: a tenant's name has 1 to {MAX_TENANT_CHARS} characters")
    if not (MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"entry {number} of api_keys: a key has {MIN_KEY_CHARS} to {MAX_KEY_CHARS} ASCII characters, no spaces"
        )
    return tenant, key


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _unauthenticated(message: str) -> RequestError:
    return RequestError(message, code=RejectCode.UNAUTHENTICATED, field="authorization")
