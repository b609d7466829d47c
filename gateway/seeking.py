"""Finding the instance for a relay's next attempt: in line if need be; for an answer under way at once, or within a bound of its own."""

import asyncio

from gateway.asked import Asked
from gateway.attempts import Attempts
from gateway.composition import Composition
from gateway.errors import ModelNotFound, NoInstance
from gateway.ledger import Place
from gateway.policy.view import InstanceView
from migration.leg import InstanceId

CHOOSE_AGAIN_S = 0.05
"""Between two looks for an instance that can go on with an answer."""


async def seek(
    parts: Composition, place: Place, asked: Asked, attempts: Attempts, output_tokens: int, deadline: asyncio.Timeout
) -> InstanceView:
    """The next instance. An answer that is under way waits for one, up to a bound; a request that has seen nothing does not.

    `output_tokens` it has had, which are computed anew; `deadline` is that of the first byte. Raises GatewayError.
    """
    settings = parts.settings
    while True:
        excluded = attempts.excluded(await parts.ledger.view(settings.view_max_age_s))
        try:
            return await _choose(parts, place, asked, excluded, deadline, attempts, output_tokens)
        except (NoInstance, ModelNotFound):
            if attempts.failure is None:
                raise
            if not attempts.under_way or parts.clock() - attempts.failed_at_s >= settings.resume_wait_s:
                if attempts.resuming is not None:
                    parts.metrics.resumes.outcomes.labels("failed", "no_instance").inc()
                raise attempts.failure from None
        await asyncio.sleep(CHOOSE_AGAIN_S)


async def _choose(
    parts: Composition,
    place: Place,
    asked: Asked,
    excluded: frozenset[InstanceId],
    deadline: asyncio.Timeout,
    attempts: Attempts,
    output_tokens: int,
) -> InstanceView:
    """Time in line counts towards its tier's patience, and not towards the deadline of the first byte."""
    queued_s, deadline_s = place.queued_s, deadline.when()
    if asked.tier.sheddable and not deadline.expired():
        deadline.reschedule(None)
    try:
        return await parts.dispatcher.choose(
            place, asked.fields.model, excluded, under_way=attempts.under_way, in_line=attempts.in_line, output_tokens=output_tokens
        )
    finally:
        if deadline_s is not None and deadline.when() is None:
            deadline.reschedule(deadline_s + place.queued_s - queued_s)
