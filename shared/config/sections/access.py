"""Keys, certificates, names of hosts and origins."""

from typing import Annotated

from shared.config.section import Section, advanced, common
from shared.exposure import is_loopback


class AccessSettings(Section, frozen=True, kw_only=True):
    TITLE = "Access"
    api_keys: Annotated[
        str,
        common(
            "Keys that open the gateway: `tenant:key, ...`, or keys alone. Empty, here and in api_keys_file: no "
            "authentication, and the header x-tenant names the tenant."
        ),
    ] = ""
    api_keys_file: Annotated[str, common("A file with the same, one key to a line.")] = ""
    tls_cert_file: Annotated[
        str, common("Certificate as PEM; with it and tls_key_file gRPC and HTTP speak TLS only.")
    ] = ""
    tls_key_file: Annotated[str, common("Private key of tls_cert_file, as PEM.")] = ""
    tls_client_ca_file: Annotated[
        str, advanced("Authority as PEM; clients must show a certificate that it has signed.")
    ] = ""
    allowed_hosts: Annotated[
        str,
        common(
            "Names in the Host header of HTTP that are answered, beside those of loopback: `name, *.domain`, or `*`. "
            "Empty: any; but only those of loopback where host is loopback, so that no web page gets in by a name of "
            "its own."
        ),
    ] = ""
    cors_allow_origins: Annotated[
        str, common("Web pages of other origins that may ask over HTTP: `https://chat.example, ...`, or `*`.")
    ] = ""

    def is_open_to_others(self, host: str) -> bool:
        """Whether other machines reach a gateway that listens at `host`, and need neither a key nor a certificate."""
        return not (is_loopback(host) or self.api_keys or self.api_keys_file or self.tls_client_ca_file)
