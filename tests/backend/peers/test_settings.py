"""What gateways and backends have in common."""

import pytest
from pydantic import ValidationError

from backend.llumlet.settings import LlumletSettings
from gateway.settings import GatewaySettings


@pytest.mark.parametrize("settings", [{"tls_certificate": "a"}, {"tls_key": "a"}, {"tls_client_ca": "a"}])
@pytest.mark.parametrize("kind", [GatewaySettings, LlumletSettings])
def test_halves_stop_the_process(kind: type[GatewaySettings] | type[LlumletSettings], settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(settings)


@pytest.mark.parametrize("kind", [GatewaySettings, LlumletSettings])
def test_a_secret_that_can_be_guessed_stops_the_process_and_none_is_shown(kind: type[GatewaySettings] | type[LlumletSettings]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate({"fleet_secret": "hush"})
    settings = kind.model_validate({"fleet_secret": "h" * 16 + "," + "k" * 16})
    assert settings.fleet_secrets == (b"h" * 16, b"k" * 16)
    assert "hhh" not in repr(settings)
    assert kind.model_validate({"fleet_secret": ""}).fleet_secrets == ()
