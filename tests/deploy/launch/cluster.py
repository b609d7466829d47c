"""Stands in for the API server of a Kubernetes cluster: the few routes that the launcher uses, over HTTP.

What it is sent is checked against the models that the official client has from the published schemas; anything else is an error.
"""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, get_args, get_origin

from kubernetes import client
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from deploy.launch.kubernetes import LABEL, MERGE, MODEL

NAMESPACE = "models"
CREATED = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class ApiServer:
    """StatefulSets and their pods. Pods come at once, and go when a test says so."""

    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    conflicts: int = 0
    """So many changes are refused because somebody else was faster."""

    def add(self, name: str, model: str) -> None:
        labels = {LABEL: name}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "backend"}]}}
        self.sets[name] = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name, "labels": labels, "annotations": {MODEL: model}, "resourceVersion": "1"},
            "spec": {"replicas": 0, "serviceName": name, "selector": {"matchLabels": labels}, "template": template},
        }

    def app(self) -> Starlette:
        sets = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"
        return Starlette(
            routes=[
                Route(sets, self._list_sets, methods=["GET"]),
                Route(sets + "/{name}", self._patch_set, methods=["PATCH"]),
                Route(f"/api/v1/namespaces/{NAMESPACE}/pods", self._list_pods, methods=["GET"]),
                Route("/{rest:path}", self._unknown, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ]
        )

    def reap(self) -> None:
        """Pods that were told to stop are gone."""
        for name in [name for name, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"]]:
            del self.pods[name]
        self._reconcile()

    def _reconcile(self) -> None:
        """As the StatefulSet's controller does, with pods in parallel."""
        for name, each in self.sets.items():
            wanted = {f"{name}-{ordinal}" for ordinal in range(each["spec"]["replicas"])}
            for pod in wanted - self.pods.keys():
                self.pods[pod] = _pod(pod, name)
            for pod in {pod for pod in self.pods if pod.rpartition("-")[0] == name} - wanted:
                self.pods[pod]["metadata"]["deletionTimestamp"] = CREATED.isoformat()

    async def _list_sets(self, request: Request) -> JSONResponse:
        self._check_selector(request)
        return JSONResponse({"apiVersion": "apps/v1", "kind": "StatefulSetList", "items": list(self.sets.values())})

    async def _list_pods(self, request: Request) -> JSONResponse:
        self._check_selector(request)
        return JSONResponse({"apiVersion": "v1", "kind": "PodList", "items": list(self.pods.values())})

    async def _patch_set(self, request: Request) -> JSONResponse:
        each = self.sets.get(request.path_params["name"])
        change = json.loads(await request.body())
        if each is None:
            return _status(404, "NotFound")
        if request.headers["content-type"] != MERGE:
            self.complaints.append(f"a patch of type {request.headers['content-type']}")
        self.complaints += unknown_fields(client.V1StatefulSet, change)
        meta = each["metadata"]
        if self.conflicts or change["metadata"].get("resourceVersion") != meta["resourceVersion"]:
            self.conflicts = max(0, self.conflicts - 1)
            return _status(409, "Conflict")
        meta["annotations"] |= change["metadata"]["annotations"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)
        each["spec"]["replicas"] = change["spec"]["replicas"]
        self._reconcile()
        return JSONResponse(each)

    async def _unknown(self, request: Request) -> JSONResponse:
        self.complaints.append(f"{request.method} {request.url.path}")
        return _status(404, "NotFound")

    def _check_selector(self, request: Request) -> None:
        if dict(request.query_params) != {"labelSelector": LABEL}:
            self.complaints.append(f"a list of {request.query_params}")


def unknown_fields(model: type[BaseModel], value: dict[str, Any], path: str = "") -> list[str]:
    """Fields of a document, at any depth, that its schema does not know."""
    by_name = {one.serialization_alias or name: one.annotation for name, one in model.model_fields.items()}
    found = []
    for name, inner in value.items():
        if name not in by_name:
            found.append(f"unknown field {path}{name}")
            continue
        inside = _model_in(by_name[name])
        for each in inner if isinstance(inner, list) else [inner]:
            if inside is not None and isinstance(each, dict):
                found += unknown_fields(inside, each, f"{path}{name}.")
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Optional[...]` and `List[...]`; a map's values are not looked at."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is dict:
        return None
    return next((found for inner in get_args(annotation) if (found := _model_in(inner)) is not None), None)


def _pod(name: str, owner: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL: owner}, "creationTimestamp": CREATED.isoformat()},
        "spec": {"containers": [{"name": "backend"}]},
        "status": {"phase": "Running"},
    }


def _status(code: int, reason: str) -> JSONResponse:
    return JSONResponse({"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code}, code)
