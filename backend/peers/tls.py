"""TLS on both sides of a process: what it listens with, and whom it trusts where it asks."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict


class ServerTls(TypedDict, total=False):
    """What uvicorn's configuration takes; empty without TLS."""

    ssl_certfile: Path
    ssl_keyfile: Path
    ssl_ca_certs: str
    ssl_cert_reqs: int


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM. Nothing named: no TLS where it listens, and the system's CAs where it asks."""

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    ca: Path | None = None

    @property
    def scheme(self) -> str:
        """Of the URL under which the process is reached."""
        return "http" if self.certificate is None else "https"

    def for_server(self) -> ServerTls:
        """How to listen."""
        if self.certificate is None or self.key is None:
            return {}
        options: ServerTls = {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            options |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options

    def for_client(self) -> ssl.SSLContext:
        """How to ask `https` URLs: names are checked, and this process shows its own certificate if asked. Raises OSError for bad files."""
        context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context
