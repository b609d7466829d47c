"""All of /admin, behind its token."""

from fastapi import APIRouter, Depends

from gateway.admin import backends, decisions, events, instances, migrations, requests, scaling
from gateway.admin.access import require_admin


def admin_router() -> APIRouter:
    """The routes of every module here."""
    router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin)])
    for part in (instances, backends, requests, events, decisions, migrations, scaling):
        router.include_router(part.router)
    return router
