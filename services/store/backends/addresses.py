"""Which backend a store has: read from the setting `store_backend`."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from services.store.backends.interface import BackendAddress
from shared.config.sources import read_size
from shared.errors import ConfigError


def backend_at(url: str) -> BackendAddress:
    """Raises ConfigError for an address that cannot be one, or where a package is missing."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme == "mooncake":
        from services.store.backends.mooncake import mooncake_at

        address = mooncake_at(_host_and_port(url), _size(url, options.pop("segment", "0")))
    elif parts.scheme == "lmcache":
        from services.store.backends.lmcache import lmcache_at

        address = lmcache_at(*_host_and_port(url))
    elif parts.scheme == "nixl":
        from services.store.backends.nixl import nixl_at

        address = nixl_at(parts.netloc, parts.path)
    else:
        raise ConfigError(f"store_backend {url} is none of mooncake://HOST:PORT, lmcache://HOST:PORT, nixl://POSIX/DIR")
    if options:
        raise ConfigError(f"store_backend {url} has options that it does not know: {', '.join(sorted(options))}")
    return address


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"store_backend {url} needs a host and a port, as {parts.scheme}://127.0.0.1:50051")
    return host, port


def _size(url: str, text: str) -> int:
    size = read_size(text)
    if isinstance(size, int):
        return size
    if not size.isdecimal():
        raise ConfigError(f"store_backend {url}: {text!r} is no size, such as 1073741824 or 1GiB")
    return int(size)
