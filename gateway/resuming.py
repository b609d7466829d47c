"""PURE. Going on at another instance with a request whose own is gone: what can be resumed, who can take it, and what it is told."""

import base64
import json

from backend.registry.instance import InstanceKind
from gateway.errors import RawHeaders
from gateway.openai import BodyFields
from gateway.policy.view import InstanceView
from gateway.transcript import Transcript
from migration.leg import Leg

EPOCH_STRIDE = 1000
"""Far above what the moves of one instance try, one epoch each: what is left of earlier legs can never be taken for the new one."""


def next_epoch(epoch: int) -> int:
    """Larger than every epoch before, also those of moves that were never announced."""
    return (epoch // EPOCH_STRIDE + 1) * EPOCH_STRIDE


def why_not_resumable(fields: BodyFields, transcript: Transcript, *, shown: bool) -> str | None:
    """Why a request cannot go on from what its client has been shown, as a snake_case word; None if it can."""
    if fields.n != 1:
        return "n"
    if fields.prompts > 1:
        return "prompts"
    if transcript.forgotten:
        return "memory"
    if not transcript.contiguous:
        return "ids_unknown"
    if (fields.logprobs and not shown) or (fields.logprobs_at_end and transcript.tokens):
        return "logprobs"  # its answer tells the figures of all tokens, and those of the first are gone
    return None


def can_take_over(instance: InstanceView) -> bool:
    """Whether it can go on from token ids. A plain OpenAI server can only begin anew."""
    return instance.report.kind is not InstanceKind.PASSIVE


def resume_order(leg: Leg, tier: str, target: str, headers: RawHeaders, body: bytes, transcript: Transcript) -> bytes:
    """The body of POST /midstream/resume (docs/wire.md). `headers` are those an instance gets with the request itself."""
    http = {
        "path": target,
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers],
        "body": base64.b64encode(body).decode(),
    }
    order = {
        "request": leg.request,
        "epoch": leg.epoch,
        "tier": tier,
        "created": transcript.created,
        "tokens": transcript.token_ids,
        "http": http,
    }
    return json.dumps(order, separators=(",", ":")).encode()
