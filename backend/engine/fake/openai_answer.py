"""PURE. OpenAI's answers, in vLLM's words: chunks of a stream, whole answers, usage, log-probabilities, errors."""

from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.fake.telling import Choice, Delta, Json, encode
from backend.engine.fake.vocabulary import label, piece
from migration.messages import TokenStep


def event(value: Json) -> bytes:
    """An SSE event."""
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """The prompt counts once, whatever n is."""
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens, "completion_tokens": completion_tokens}


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str
    chat: bool
    prompt_tokens: int
    include_usage: bool = False
    continuous_usage: bool = False

    def early(self) -> Sequence[bytes]:
        return ()

    def opening(self, choices: int) -> Sequence[bytes]:
        return [self._chunk([self._role(index)], self._used(0)) for index in range(choices)] if self.chat else ()

    def tell(self, delta: Delta, choice: Choice) -> Sequence[bytes]:
        return [self._chunk([self._delta(delta, choice)], self._used(choice.tokens))]

    def closing(self, choices: Sequence[Choice]) -> Sequence[bytes]:
        if not self.include_usage:
            return [DONE]
        return [self._chunk([], usage(self.prompt_tokens, sum(choice.tokens for choice in choices))), DONE]

    def _used(self, tokens: int) -> Json | None:
        return usage(self.prompt_tokens, tokens) if self.continuous_usage else None

    def _chunk(self, choices: Sequence[Json], used: Json | None = None) -> bytes:
        """An event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        value: dict[str, object] = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if used is not None:
            value["usage"] = used
        return event(value)

    def _role(self, index: int) -> Json:
        """The first choice entry of a chat stream."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def _delta(self, delta: Delta, choice: Choice) -> Json:
        """The choice entry of one output; `choice` has grown by it already."""
        steps = choice.steps[-1:] if delta.step is not None else []
        body: dict[str, object] = {"index": delta.index}
        if self.chat:
            body["delta"] = {"content": delta.text}
        else:
            body["text"] = delta.text
        body |= {"logprobs": self._logprobs(steps), "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None or not self.chat:
            body["stop_reason"] = delta.stop_reason
        return body

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The answer to a request that does not stream."""
        kind = "chat.completion" if self.chat else "text_completion"
        entries = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        used = usage(self.prompt_tokens, sum(choice.tokens for choice in choices))
        return encode({"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": entries, "usage": used})

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        body: dict[str, object] = {"index": index}
        if self.chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None, "tool_calls": []}
        else:
            body["text"] = choice.text
        return body | {"logprobs": self._logprobs(choice.steps), "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _logprobs(self, steps: Sequence[tuple[TokenStep, int]]) -> Json | None:
        if not steps or steps[0][0].logprobs is None:
            return None
        if self.chat:
            return {"content": [_chat_logprob(step) for step, _ in steps]}
        return {
            "text_offset": [offset for _, offset in steps],
            "token_logprobs": [step.logprobs[1][0] for step, _ in steps if step.logprobs],
            "tokens": [label(step.token) for step, _ in steps],
            "top_logprobs": [_top_by_label(step) for step, _ in steps],
        }


def _chat_logprob(step: TokenStep) -> Json:
    tokens, values, _ = step.logprobs or ((step.token,), (0.0,), 1)
    entries = [{"token": label(t), "logprob": v, "bytes": list(piece(t))} for t, v in zip(tokens, values, strict=True)]
    return entries[0] | {"top_logprobs": entries[1:]}


def _top_by_label(step: TokenStep) -> Json:
    tokens, values, _ = step.logprobs or ((step.token,), (0.0,), 1)
    return {label(t): v for t, v in zip(tokens, values, strict=True)}


def error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code or status}})
