"""What a client asks: its request read, its tier chosen, its caller admitted."""

from dataclasses import dataclass, replace

from starlette.types import Scope

from gateway.access.caller import Caller
from gateway.aliases import rename_model
from gateway.downstream import Downstream
from gateway.errors import RawHeaders
from gateway.headers import find_header, passed_headers, request_headers
from gateway.openai import BodyFields, read_body
from gateway.policy.tier import Tier, Tiers
from gateway.priority import choose_tier
from gateway.settings import GatewaySettings
from migration.leg import Leg, RequestId


@dataclass(frozen=True, slots=True)
class Asked:
    """`target` is path and query; `body` is what goes on to an instance. `tier_note` tells the client of a tier that is not known."""

    headers: RawHeaders
    target: str
    body: bytes
    fields: BodyFields
    tier: Tier
    tier_note: str | None

    @property
    def path(self) -> str:
        """The route that was asked for."""
        return self.target.partition("?")[0]

    def headers_to(self, is_member: bool, leg: Leg, rank: int) -> RawHeaders:
        """The headers of its request to an instance; what a llumlet has to know only to a member of the fleet."""
        if not is_member:
            return passed_headers(self.headers, leg.request)
        return request_headers(self.headers, leg.request, self.tier.name, rank, leg.epoch)

    def told(self, request: RequestId) -> RawHeaders:
        """The headers of its answer that are known from the start."""
        ours = ((b"x-request-id", request.encode()), (b"x-midstream-tier", self.tier.name.encode()))
        return ours if self.tier_note is None else (*ours, (b"x-midstream-tier-note", self.tier_note.encode()))


async def read_request(scope: Scope, client: Downstream, caller: Caller, settings: GatewaySettings, tiers: Tiers) -> Asked:
    """All of it. Raises GatewayError, ClientLeft."""
    headers = tuple(scope["headers"])
    declared = find_header(headers, b"content-length")
    body = await client.read_body(declared, settings.max_body_bytes, settings.body_timeout_s)
    fields = read_body(body)
    choice = choose_tier(headers, fields, tiers)
    await caller.admit(fields.model, choice.tier.name, fields.prompt_tokens + fields.max_output_tokens)
    if (own_name := settings.aliases.get(fields.model or "")) is not None:
        body, fields = rename_model(body, own_name), replace(fields, model=own_name)
    query = scope["query_string"]
    target = scope["path"] + (f"?{query.decode('latin-1')}" if query else "")
    return Asked(headers, target, body, fields, choice.tier, choice.note)
