"""PURE. Where a request goes that waits at an instance, preempted or bound ahead of room, once another instance has room for it.

It has no memory to carry, so going costs nothing; but it goes only where it starts at once, and else keeps its place at the head of its
queue, which makes its instance a source of migrations.
"""

from dataclasses import replace
from random import Random

from gateway.policy.line import Binding, LinePolicy, LineView, Waiting
from gateway.policy.view import ClusterView
from migration.leg import InstanceId

_NO_MORE_AHEAD = 2**30


def elsewhere(
    waiting: Waiting, instance: InstanceId, line: LinePolicy, cluster: ClusterView, now_s: float, expected_output_tokens: float, rng: Random
) -> Binding | None:
    """A place for it with room, on another instance than `instance`; None if there is none."""
    leaving = replace(waiting, view=replace(waiting.view, excluded=waiting.view.excluded | {instance}))
    bindings = line.bind(LineView((leaving,), now_s, _NO_MORE_AHEAD, expected_output_tokens), cluster, rng)
    return bindings[0] if bindings and not bindings[0].ahead else None
