"""The Kubernetes launcher, and the only importer of its client: backends as pods of StatefulSets, one StatefulSet a model.

A StatefulSet counts its pods: it grows at the end and shrinks at the end, so only the last pod of each can be stopped. A pod's name is its
instance's id. Which launch became which pod is noted on the StatefulSet, in the same change that adds the pod; every change names the
version it was decided on (`resourceVersion`), so two of them never pass each other.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from gateway.scaling.launcher import Launched, LauncherError, LaunchState
from migration.leg import InstanceId

T = TypeVar("T")

LABEL = "midstream.dev/backend"
"""On StatefulSets and their pods; its value is the StatefulSet's name."""
MODEL = "midstream.dev/model"
"""Annotation of a StatefulSet: the name its model is served under."""
LAUNCHES = "midstream.dev/launches"
"""Annotation of a StatefulSet: launch keys and the ordinals they got, in JSON."""
MERGE = "application/merge-patch+json"
BAD_REASONS = frozenset(
    {"CrashLoopBackOff", "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError"}
)
"""Of a waiting container: it will not become ready by itself."""


@dataclass(frozen=True, slots=True)
class _Set:
    """A StatefulSet, as far as it matters here."""

    name: str
    model: str
    replicas: int
    version: str
    launches: dict[str, int]

    def pod(self, ordinal: int) -> InstanceId:
        return InstanceId(f"{self.name}-{ordinal}")

    def ordinal(self, instance: InstanceId) -> int | None:
        name, _, number = instance.rpartition("-")
        return int(number) if name == self.name and number.isascii() and number.isdecimal() else None


class KubernetesLauncher:
    """Implements Launcher, but for the fence. `now` is the time in UTC, for the ages of pods alone."""

    def __init__(
        self, apps: client.AppsV1Api, core: client.CoreV1Api, namespace: str, *, timeout_s: float, now: Callable[[], datetime]
    ) -> None:
        self._apps = apps
        self._core = core
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._now = now

    async def launch(self, key: InstanceId, model: str | None) -> InstanceId:
        sets = await self._sets()
        for each in sets:
            known = each.launches.get(key)
            if known is not None and known < each.replicas:
                return each.pod(known)
        chosen = next((each for each in sets if model in (None, each.model)), None)
        if chosen is None:
            raise LauncherError(f"No StatefulSet with the label {LABEL} serves '{model}'.")
        launches = {name: ordinal for name, ordinal in chosen.launches.items() if ordinal < chosen.replicas}
        await self._resize(chosen, chosen.replicas + 1, {**launches, key: chosen.replicas})
        return chosen.pod(chosen.replicas)

    async def stop(self, instance: InstanceId) -> None:
        for each in await self._sets():
            ordinal = each.ordinal(instance)
            if ordinal is None or ordinal >= each.replicas:
                continue
            if ordinal != each.replicas - 1:
                raise LauncherError(f"A StatefulSet shrinks at its end: '{each.pod(each.replicas - 1)}' goes before '{instance}'.")
            await self._resize(each, ordinal, {name: number for name, number in each.launches.items() if number < ordinal})

    async def list(self) -> Sequence[Launched]:
        pods = await self._call(self._core.list_namespaced_pod, self._namespace, label_selector=LABEL)
        by_name = {str(pod.metadata.name): pod for pod in pods.items}
        launched: list[Launched] = []
        for each in await self._sets():
            ordinals = {ordinal for name in by_name if (ordinal := each.ordinal(InstanceId(name))) is not None}
            wanted = sorted(ordinals | set(range(each.replicas)))
            launched += [self._describe(each, ordinal, by_name.get(each.pod(ordinal))) for ordinal in wanted]
        return launched

    def _describe(self, each: _Set, ordinal: int, pod: Any) -> Launched:
        """A pod that is to be, and is not there yet, counts as running since now."""
        state, detail, age_s = LaunchState.RUNNING, "", 0.0
        if pod is not None:
            age_s = max(0.0, (self._now() - pod.metadata.creation_timestamp).total_seconds())
            detail = _fault(pod)
            state = LaunchState.EXITED if detail else state
        if ordinal >= each.replicas or (pod is not None and pod.metadata.deletion_timestamp is not None):
            state = LaunchState.STOPPING
        return Launched(each.pod(ordinal), each.model, ordinal + 1, age_s, state, ordinal == each.replicas - 1, detail)

    async def _sets(self) -> Sequence[_Set]:
        found = await self._call(self._apps.list_namespaced_stateful_set, self._namespace, label_selector=LABEL)
        return sorted((_read(each) for each in found.items), key=lambda each: each.name)

    async def _resize(self, each: _Set, replicas: int, launches: dict[str, int]) -> None:
        change = {
            "metadata": {"resourceVersion": each.version, "annotations": {LAUNCHES: json.dumps(launches)}},
            "spec": {"replicas": replicas},
        }
        await self._call(self._apps.patch_namespaced_stateful_set, each.name, self._namespace, change, _content_type=MERGE)

    async def _call(self, question: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """The client waits in a thread. Raises LauncherError."""
        try:
            return await asyncio.to_thread(question, *arguments, _request_timeout=self._timeout_s, **options)
        except ApiException as error:
            if error.status == 409:
                raise LauncherError("The StatefulSet was changed by somebody else meanwhile.") from error
            raise LauncherError(f"The Kubernetes API answered {error.status}: {error.reason}") from error
        except (HTTPError, OSError) as error:
            raise LauncherError(f"The Kubernetes API does not answer: {error}") from error


def open_launcher(namespace: str, timeout_s: float, now: Callable[[], datetime]) -> KubernetesLauncher:
    """With the rights of the pod this runs in, or else of the local kubeconfig. Raises LauncherError."""
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config()
        except config.ConfigException as error:
            raise LauncherError(f"no access to a Kubernetes cluster: {error}") from error
    return KubernetesLauncher(client.AppsV1Api(), client.CoreV1Api(), namespace, timeout_s=timeout_s, now=now)


def _read(found: Any) -> _Set:
    annotations = found.metadata.annotations or {}
    launches = json.loads(annotations.get(LAUNCHES, "{}"))
    replicas = 1 if found.spec.replicas is None else int(found.spec.replicas)
    name = str(found.metadata.name)
    return _Set(name, annotations.get(MODEL, name), replicas, str(found.metadata.resource_version), launches)


def _fault(pod: Any) -> str:
    """Why a pod will not become ready, if that can be told."""
    for status in pod.status.container_statuses or ():
        waiting = status.state.waiting if status.state else None
        if waiting is not None and waiting.reason in BAD_REASONS:
            return f"{waiting.reason}: {waiting.message or ''}"
    return "the pod has failed" if pod.status.phase == "Failed" else ""
