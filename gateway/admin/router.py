"""All of /admin, behind its token."""

from fastapi import APIRouter, Depends

from gateway.admin import decisions, events, instances, migrations, requests
from gateway.admin.access import require_admin


def admin_router() -> APIRouter:
    """The routes of every module here."""
    router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin)])
    for part in (instances, requests, events, decisions, migrations):
        router.include_router(part.router)
    return router
