"""The knobs that gateways and backends have in common, because they concern what lies between them."""

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from backend.peers.signature import Secrets, read_secrets
from backend.peers.tls import TlsFiles


class PeerSettings(BaseSettings):
    """The base of a gateway's and of a backend's settings."""

    model_config = SettingsConfigDict(env_prefix="MIDSTREAM_", env_file=".env", extra="ignore", frozen=True)

    fleet_secret: SecretStr | None = Field(
        default=None,
        description="Secret with which gateways and backends sign what they ask each other, at least 16 bytes, the same for all. Several, "
        "separated by commas: the first signs, all are accepted. Unset: /midstream/* is for processes of the same machine.",
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="File of the certificate (PEM, with what is between it and its CA) to listen with, and to show to servers that ask for "
        "one. Unset: no TLS.",
    )
    tls_key: Path | None = Field(default=None, description="File of its private key (PEM).")
    tls_client_ca: Path | None = Field(
        default=None, description="File of CAs (PEM): clients must show a certificate of one of them. Unset: they need none."
    )
    tls_ca: Path | None = Field(
        default=None, description="File of CAs (PEM) that backends' certificates are checked against. Unset: those of the system."
    )

    @field_validator("fleet_secret")
    @classmethod
    def _check_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        read_secrets(secret.get_secret_value() if secret else "")
        return secret

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate: without TLS nobody shows one")
        return self

    @property
    def fleet_secrets(self) -> Secrets:
        """Those to sign with and to accept; empty if none is set."""
        return read_secrets(self.fleet_secret.get_secret_value() if self.fleet_secret else "")

    @property
    def tls(self) -> TlsFiles:
        """The files for TLS, as far as they are named."""
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca, self.tls_ca)
