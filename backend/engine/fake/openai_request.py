"""PURE. The request bodies the fake engine understands, and the job each asks for. Unknown fields are accepted and ignored."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from backend.engine.fake.detokenizer import StopRule
from backend.engine.fake.sampling import MAX_LOGPROBS, Sampling
from backend.engine.fake.vocabulary import VOCABULARY, tokenize

_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""

TokenId = Annotated[int, Field(ge=0, lt=VOCABULARY)]
Count = Annotated[int, Field(ge=1)]


class BadRequest(Exception):
    """The body cannot be served; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(BaseModel):
    """When usage is told in a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(BaseModel):
    """What both have in common."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False


class TextPart(BaseModel):
    """A part of a message. Only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn."""

    role: str
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        """All of its text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(Body):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0


class CompletionBody(Body):
    """POST /v1/completions"""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False


class InputPart(BaseModel):
    """A part of an item."""

    type: Literal["input_text", "output_text"]
    text: str


class MessagesBody(Body):
    """POST /v1/messages"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    system: str | list[TextPart] | None = None
    max_tokens: Count
    stop_sequences: list[str] | None = None


class InputMessage(BaseModel):
    """An item of a conversation. Only messages are understood."""

    role: str
    content: str | list[InputPart]

    def as_chat(self) -> ChatMessage:
        """The same turn of a chat."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ChatMessage(role=self.role, content=text)


class ResponsesBody(Body):
    """POST /v1/responses. Nothing is stored."""

    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate, and how to tell it. Choice i of prompt j has index j * n + i."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: Sampling
    seeded: bool
    """The client chose the seed."""
    stop: StopRule
    stream: bool
    include_usage: bool
    continuous_usage: bool


def chat_job(body: ChatBody, max_model_tokens: int, eos_one_in: int) -> Job:
    """Raises BadRequest if prompt and output do not fit."""
    text = "".join(f"<|{message.role}|>{message.text()}\n" for message in body.messages) + "<|assistant|>"
    prompts = (tokenize(text),)
    wanted = body.max_completion_tokens or body.max_tokens
    logprobs = body.top_logprobs if body.logprobs else None
    return _job(body, prompts, wanted, logprobs, max_model_tokens, eos_one_in, chat=True)


def messages_job(body: MessagesBody, max_model_tokens: int, eos_one_in: int) -> Job:
    """Raises BadRequest if prompt and output do not fit."""
    before = [ChatMessage(role="system", content=body.system)] if body.system else []
    fields = body.model_dump(exclude={"messages", "system", "stop_sequences"}) | {"stop": body.stop_sequences}
    return chat_job(ChatBody(**fields, messages=[*before, *body.messages]), max_model_tokens, eos_one_in)


def responses_job(body: ResponsesBody, max_model_tokens: int, eos_one_in: int) -> Job:
    """Raises BadRequest if prompt and output do not fit."""
    before = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    asked = [ChatMessage(role="user", content=body.input)] if isinstance(body.input, str) else [item.as_chat() for item in body.input]
    fields = body.model_dump(exclude={"input", "instructions", "max_output_tokens"}) | {"max_tokens": body.max_output_tokens}
    return chat_job(ChatBody(**fields, messages=[*before, *asked]), max_model_tokens, eos_one_in)


def completion_job(body: CompletionBody, max_model_tokens: int, eos_one_in: int) -> Job:
    """Raises BadRequest if there is no prompt, or prompt and output do not fit."""
    if body.echo:
        raise BadRequest("echo is not supported by this engine", "echo")
    prompts = _prompts(body.prompt)
    if not prompts or not all(prompts):
        raise BadRequest("the prompt is empty", "prompt")
    wanted = body.max_tokens or _COMPLETION_MAX_TOKENS
    return _job(body, prompts, wanted, body.logprobs, max_model_tokens, eos_one_in, chat=False)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (tokenize(prompt),)
    ids = tuple(item for item in prompt if isinstance(item, int))
    if ids:
        return (ids,)
    return tuple(tokenize(item) if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int))


def _job(
    body: Body,
    prompts: tuple[tuple[int, ...], ...],
    wanted: int | None,
    logprobs: int | None,
    max_model_tokens: int,
    eos_one_in: int,
    *,
    chat: bool,
) -> Job:
    prompt_tokens = max(len(prompt) for prompt in prompts)
    if prompt_tokens >= max_model_tokens or prompt_tokens + (wanted or 1) > max_model_tokens:
        raise BadRequest(
            f"This model's maximum context length is {max_model_tokens} tokens. However, you requested {wanted or 1} output tokens and "
            f"your prompt contains {prompt_tokens} input tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            "prompt" if not chat else "messages",
        )
    max_tokens = wanted or max_model_tokens - prompt_tokens
    if body.min_tokens > max_tokens:
        raise BadRequest(f"min_tokens must be at most max_tokens={max_tokens}, got {body.min_tokens}.", "min_tokens")
    strings = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if not all(strings):
        raise BadRequest("stop cannot contain an empty string.", "stop")
    options = body.stream_options or StreamOptions()
    return Job(
        chat=chat,
        prompts=prompts,
        n=body.n,
        sampling=Sampling(max_tokens, body.min_tokens, body.temperature, body.seed or 0, body.ignore_eos, logprobs, eos_one_in),
        seeded=body.seed is not None,
        stop=StopRule(strings, body.include_stop_str_in_output, body.min_tokens),
        stream=body.stream,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
    )
