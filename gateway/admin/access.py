"""Who may use /admin."""

import hmac

from fastapi import Request

from gateway.composition import composition_of
from gateway.errors import AdminClosed, Unauthorized


def require_admin(request: Request) -> None:
    """Raise Unauthorized or AdminClosed unless the caller may use /admin."""
    settings = composition_of(request.scope).settings
    secret = settings.admin_secret
    if secret is None:
        if not settings.listens_on_loopback:
            raise AdminClosed("Set an admin token to use /admin on an address that others can reach.")
        return
    shown = request.headers.get("authorization", "")
    if not hmac.compare_digest(shown.encode(), f"Bearer {secret}".encode()):
        raise Unauthorized("The admin token is missing or wrong.")
