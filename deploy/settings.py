"""What the launcher reads of its environment; the only module of `deploy` that does."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from backend.registry.address import checked_redis


class DeploySettings(BaseSettings):
    """The launcher's own knobs; `MIDSTREAM_` in front of each name."""

    model_config = SettingsConfigDict(env_prefix="MIDSTREAM_", env_file=".env", extra="ignore")

    home: Path = Field(default=Path(".midstream"), description="Directory for models and logs.")
    redis_url: Annotated[str, AfterValidator(checked_redis)] | None = Field(
        default=None, description="Redis to use; the launcher starts one of its own if unset."
    )
    start_timeout_s: float = Field(default=600.0, gt=0, description="Seconds an engine may take until it is healthy.")
    stop_timeout_s: float = Field(default=20.0, gt=0, description="Seconds a process may take to stop before it is killed.")

    launcher_token: SecretStr | None = Field(
        default=None, description="Bearer token that gateways show to the launcher. Unset: it listens on loopback only."
    )
    launcher_timeout_s: float = Field(default=5.0, gt=0, description="Seconds that the Kubernetes API may take to answer the launcher.")
    launcher_kill_after_s: float = Field(
        default=60.0, gt=0, description="Seconds a backend that was told to stop may take before the launcher kills it."
    )
    tls_certificate: Path | None = Field(
        default=None,
        description="For gateways and backends that are started by hand: what `midstream up` starts talks plain HTTP, so it refuses.",
    )

    visible_gpus: str | None = Field(
        default=None,
        validation_alias="CUDA_VISIBLE_DEVICES",
        description="GPUs the engines may use, separated by commas; all that are there if unset.",
    )

    @property
    def models(self) -> Path:
        """Where models made by the launcher lie."""
        return self.home.resolve() / "models"

    @property
    def logs(self) -> Path:
        """Where the logs of child processes lie."""
        return self.home.resolve() / "logs"


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process: this one's, with `extra` on top."""
    return {**os.environ, **extra}


def search_path() -> str | None:
    """PATH, to look for programs."""
    return os.environ.get("PATH")
