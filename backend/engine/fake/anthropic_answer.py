"""PURE. Anthropic's answers, in vLLM's words: the events of a message as it grows, and a whole message."""

from collections.abc import Sequence

from backend.engine.fake.telling import Choice, Delta, encode, named_event


class Message:
    """One answer: a single block of text."""

    def __init__(self, name: str, model: str, prompt_tokens: int) -> None:
        self._name = name
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._is_open = False

    def early(self) -> Sequence[bytes]:
        return ()

    def opening(self, choices: int) -> Sequence[bytes]:
        message: dict[str, object] = {"id": self._name, "type": "message", "role": "assistant", "content": [], "model": self._model}
        message |= {"stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        return [named_event({"type": "message_start", "message": message})]

    def tell(self, delta: Delta, choice: Choice) -> Sequence[bytes]:
        """Outputs that bring no text are not told of."""
        if not delta.text:
            return ()
        added = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": delta.text}}
        if self._is_open:
            return [named_event(added)]
        self._is_open = True
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [named_event(block), named_event(added)]

    def closing(self, choices: Sequence[Choice]) -> Sequence[bytes]:
        (choice,) = choices
        stopped = {"type": "message_delta", "delta": self._stop(choice), "usage": self._usage(choice.tokens)}
        events = [named_event(stopped), named_event({"type": "message_stop"})]
        return [named_event({"type": "content_block_stop", "index": 0}), *events] if self._is_open else events

    def whole(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        message = {"id": self._name, "type": "message", "role": "assistant", "content": [{"type": "text", "text": choice.text}]}
        return encode({**message, "model": self._model, **self._stop(choice), "usage": self._usage(choice.tokens)})

    def _usage(self, output_tokens: int) -> dict[str, object]:
        return {"input_tokens": self._prompt_tokens, "output_tokens": output_tokens}

    def _stop(self, choice: Choice) -> dict[str, object]:
        if choice.finish_reason == "length":
            reason = "max_tokens"
        else:
            reason = "end_turn" if choice.stop_reason is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_reason}
