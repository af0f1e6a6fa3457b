"""A path of a reverse proxy's before the server's own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class PathPrefix:
    """Serves every path also behind `prefix` (the setting `root_path`): for proxies that pass paths on as they are."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """`prefix`: without a slash at its end."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
        await self._app(scope, receive, send)


def read_prefix(root_path: str) -> str:
    """As PathPrefix has it; empty where there is none."""
    path = root_path.strip("/")
    return f"/{path}" if path else ""
