"""Answers of the responses API, in vLLM's words: one item, a message with one part of text. Its names are drawn by lot, as vLLM does it."""

import secrets
from collections.abc import Sequence
from itertools import count

from backend.engine.fake.openai_request import Job
from backend.engine.fake.telling import Choice, Delta, encode, named_event


class ResponseTelling:
    """One answer. As vLLM does it, the item is named anew in each run, and the name told in every event."""

    def __init__(self, model: str, created: int, prompt_tokens: int, job: Job) -> None:
        self._model, self._created = model, created
        self._prompt_tokens, self._max_tokens = prompt_tokens, job.sampling.max_tokens
        self._name, self._item = f"resp_{secrets.token_hex(8)}", f"msg_{secrets.token_hex(8)}"
        self._numbers = count()
        self._is_open = False

    def early(self) -> Sequence[bytes]:
        response = self._response([], "in_progress", None)
        return [self._event("response.created", response=response), self._event("response.in_progress", response=response)]

    def opening(self, choices: int) -> Sequence[bytes]:
        return ()

    def tell(self, delta: Delta, choice: Choice) -> Sequence[bytes]:
        """Outputs that bring no text are not told of."""
        if not delta.text:
            return ()
        added = () if self._is_open else self._open()
        self._is_open = True
        return [*added, self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=[])]

    def closing(self, choices: Sequence[Choice]) -> Sequence[bytes]:
        (choice,) = choices
        events = self._close(choice.text) if self._is_open else ()
        return [*events, self._event("response.completed", response=self._done(choice))]

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return encode(self._done(choices[0]))

    def _open(self) -> Sequence[bytes]:
        return [
            self._event("response.output_item.added", output_index=0, item=self._message(None, "in_progress")),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def _close(self, text: str) -> Sequence[bytes]:
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=self._message(text, "completed")),
        ]

    def _done(self, choice: Choice) -> dict[str, object]:
        items = [self._message(choice.text, "completed")] if choice.text else []
        details = {"cached_tokens": 0, "cache_write_tokens": 0}
        used = {"input_tokens": self._prompt_tokens, "input_tokens_details": details, "output_tokens": choice.tokens}
        used |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": self._prompt_tokens + choice.tokens}
        return self._response(items, "incomplete" if choice.finish_reason == "length" else "completed", used)

    def _response(self, items: Sequence[object], status: str, used: object) -> dict[str, object]:
        head = {"id": self._name, "created_at": self._created, "object": "response", "model": self._model, "status": status}
        more = {"output": items, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": 1.0, "top_p": 1.0}
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**head, **more, "incomplete_details": reason, "max_output_tokens": self._max_tokens, "usage": used}

    def _message(self, text: str | None, status: str) -> dict[str, object]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "content": content, "role": "assistant", "status": status, "type": "message"}

    def _place(self) -> dict[str, object]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> bytes:
        return named_event({"type": kind, "sequence_number": next(self._numbers), **fields})


def _part(text: str) -> dict[str, object]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": []}
