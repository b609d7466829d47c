"""PURE. What a chaos fleet and its clients are told, by the kind of engine: a real one takes longer for everything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GATEWAY = {
    "MIDSTREAM_CLAIM_TTL_S": "3",
    "MIDSTREAM_CONNECT_TIMEOUT_S": "1",
    "MIDSTREAM_ATTEMPT_TIMEOUT_S": "3",
    "MIDSTREAM_FIRST_BYTE_TIMEOUT_S": "20",
    "MIDSTREAM_IDLE_TIMEOUT_S": "3",
    "MIDSTREAM_REPORT_STALE_S": "2",
    "MIDSTREAM_STORE_TIMEOUT_S": "0.5",
    "MIDSTREAM_STORE_RETRY_S": "0.2",
    "MIDSTREAM_SWITCH_WAIT_S": "0.5",
    "MIDSTREAM_SHUTDOWN_GRACE_S": "10",
}
BACKEND = {
    "MIDSTREAM_MESSAGE_TIMEOUT_S": "2",
    "MIDSTREAM_PREPARE_TIMEOUT_S": "3",
    "MIDSTREAM_RESOLVE_TIMEOUT_S": "3",
    "MIDSTREAM_RESERVATION_TIMEOUT_S": "5",
    "MIDSTREAM_ATTACH_TIMEOUT_S": "4",
    "MIDSTREAM_STORE_TIMEOUT_S": "0.5",
    "MIDSTREAM_REPORT_TTL_S": "5",
    "MIDSTREAM_DRAIN_DEADLINE_S": "10",
}
FAKE = {
    "MIDSTREAM_FAKE_PREFIX_CACHE": "false",
    "MIDSTREAM_FAKE_DECODE_BASE_S": "0.006",
    "MIDSTREAM_FAKE_PREFILL_BASE_S": "0.006",
}
"""A token in 6 ms, and memory that is free again when its request is gone."""
VLLM = {"VLLM_LOGGING_LEVEL": "WARNING"}
# In bf16 a token computed again, or in another batch, may be another one, in its last bits.
VLLM_ARGUMENTS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "1024",
    "--block-size",
    "32",
    "--num-gpu-blocks-override",
    "256",
)
# Beside an engine that starts, a step may take seconds; and the other one is back in half a minute.
SLOW_GATEWAY = {
    "MIDSTREAM_ATTEMPT_TIMEOUT_S": "10",
    "MIDSTREAM_FIRST_BYTE_TIMEOUT_S": "60",
    "MIDSTREAM_IDLE_TIMEOUT_S": "20",
    "MIDSTREAM_REPORT_STALE_S": "5",
    "MIDSTREAM_RESUME_WAIT_S": "90",
}
SLOW_BACKEND = {"MIDSTREAM_MESSAGE_TIMEOUT_S": "5", "MIDSTREAM_PREPARE_TIMEOUT_S": "10", "MIDSTREAM_REPORT_TTL_S": "10"}


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one kind of engine: environments, vLLM's arguments, the lengths of answers, and how long a client waits for a whole one."""

    gateway: Mapping[str, str]
    backend: Mapping[str, str]
    arguments: Sequence[str]
    output_tokens: Sequence[int]
    patience_s: float
    start_timeout_s: float


PACES: Mapping[str, Pace] = {
    "fake": Pace(GATEWAY, {**FAKE, **BACKEND}, (), (40, 80, 120, 160, 200, 240), 45.0, 60.0),
    "vllm": Pace({**GATEWAY, **SLOW_GATEWAY}, {**VLLM, **BACKEND, **SLOW_BACKEND}, VLLM_ARGUMENTS, (10, 20, 30, 40, 50, 60), 180.0, 300.0),
}
"""Patience is more than all of the fleet's own deadlines together."""
FORGETFUL = {
    "MIDSTREAM_RESUMABLE_TTL_S": "60",
    "MIDSTREAM_RESPONSE_TTL_S": "60",
    "MIDSTREAM_SWITCH_TTL_S": "60",
    "MIDSTREAM_DECISIONS_KEPT": "200",
}
"""What is remembered for a while is complete within two minutes: what still grows then is not remembered but leaked."""
SOAK = Pace(FORGETFUL, FAKE, (), PACES["fake"].output_tokens, 45.0, 60.0)
"""No faults, and the product's own deadlines."""
