"""vLLM's asynchronous engine client, taught to note tokens, to hand over an arriving request as a shell, and to replay known tokens.

Everything below the OpenAI server that concerns one request passes through `generate`; so templates, tool and reasoning parsers, stop
strings, usage and log-probabilities of a moved request are rebuilt by vLLM's own code from the replay, and never serialised.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import STREAM_FINISHED, PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from backend.engine.flight import Flight, current_flight
from backend.engine.vllm import orders
from migration.messages import TokenStep


class OrderedCollector(RequestOutputCollector):
    """Hands deltas over one by one. vLLM's own merges those that its consumer has not fetched in time, so that chunk boundaries
    depend on timing; then a moved stream could not equal an unmoved one (docs/decisions/0004-one-event-per-token.md)."""

    def __init__(self, plain: RequestOutputCollector) -> None:
        super().__init__(RequestOutputKind.DELTA, plain.request_id)
        self._outputs: deque[RequestOutput | PoolingRequestOutput | Exception] = deque()

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        self._outputs.append(output)
        self.ready.set()

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        while (output := self.get_nowait()) is None:
            await self.ready.wait()
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        if not self._outputs:
            self.ready.clear()
            return None
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        return output


class NotingOutputProcessor(OutputProcessor):
    """Writes the tokens of requests that belong to a flight into the flight's history, as they come from the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flights: dict[str, Flight] = {}
        self.engine_requests: dict[str, EngineCoreRequest] = {}
        """The engine's own form of each request of a flight, by engine request id."""
        self._ordered: dict[str, OrderedCollector] = {}

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        flight = current_flight.get()
        if flight is not None:
            self._hand_over_in_order(request)
            self.flights[request.request_id] = flight
            self.engine_requests[request.request_id] = request
            flight.engine_requests.append(request.request_id)
            flight.prompt_tokens = len(request.prompt_token_ids or ())
            flight.unmovable = flight.unmovable or self._why_unmovable(request, flight)

    def _why_unmovable(self, request: EngineCoreRequest, flight: Flight) -> str | None:
        """What keeps a request from being carried exactly. Everything else is carried (docs/migration.md)."""
        params = request.sampling_params
        reasons = {
            "n": self.request_states[request.request_id].parent_req is not None,
            "prompts": len(flight.engine_requests) > 1,
            "pooling": params is None,
            "prompt_logprobs": params is not None and params.prompt_logprobs is not None,
            "multimodal": bool(request.mm_features),
            "prompt_embeds": request.prompt_embeds is not None,
            "lora": request.lora_request is not None,
            "streaming_input": request.resumable,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def process_outputs(self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            flight = self.flights.get(output.request_id)
            if flight is not None and output.new_token_ids and output.request_id in self.request_states:
                if output.prefill_stats is not None and not flight.history:
                    flight.prefill = (output.prefill_stats.num_cached_tokens, output.prefill_stats.num_cache_creation_tokens)
                flight.note_tokens(_steps(output))
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def collector_of(self, plain: RequestOutputCollector) -> RequestOutputCollector:
        """Where the outputs go of the request for which vLLM made this collector."""
        return self._ordered.get(plain.request_id, plain)

    def _hand_over_in_order(self, request: EngineCoreRequest) -> None:
        """For one stream of deltas. With n > 1 the collector is shared by all of them, and nothing moves anyway."""
        state = self.request_states[request.request_id]
        params = request.sampling_params
        if params is not None and params.output_kind == RequestOutputKind.DELTA and state.parent_req is None and state.queue is not None:
            state.queue = self._ordered[request.request_id] = OrderedCollector(state.queue)

    def forget(self, request_id: str) -> None:
        self._ordered.pop(request_id, None)
        self.flights.pop(request_id, None)
        self.engine_requests.pop(request_id, None)


class KnownOutput:
    """Known tokens in the form in which the engine would have put them out, with the end where vLLM's scheduler would have seen it."""

    def __init__(self, request: EngineCoreRequest, max_model_tokens: int, prefill: tuple[int, int] | None = None) -> None:
        self._prefill = None if prefill is None else PrefillStats(num_cached_tokens=prefill[0], num_cache_creation_tokens=prefill[1])
        self._request = Request.from_engine_core_request(request, None)
        self._max_model_tokens = max_model_tokens
        params = request.sampling_params
        self._with_logprobs = params is not None and params.logprobs is not None

    def output(self, step: TokenStep) -> EngineCoreOutput:
        """The next one. Figures that nobody knows any more are made up, for events that the client has been shown already."""
        request = self._request
        request.append_output_token_ids(step.token)
        ended = check_stop(request, self._max_model_tokens)
        prefill, self._prefill = self._prefill, None
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[step.token],
            new_logprobs=self._figures(step),
            finish_reason=request.get_finished_reason() if ended else None,
            stop_reason=request.stop_reason if ended else None,
            prefill_stats=prefill,
        )

    def _figures(self, step: TokenStep) -> LogprobsLists | None:
        if not self._with_logprobs:
            return None
        ids, logprobs, rank = step.logprobs or ((step.token,), (0.0,), 1)
        return LogprobsLists(np.array([ids], dtype=np.int32), np.array([logprobs], dtype=np.float32), np.array([rank], dtype=np.int32))


class MigratingLLM(AsyncLLM):
    """AsyncLLM whose `generate` serves flights. Requests without a flight are served exactly as vLLM serves them."""

    output_processor: OutputProcessor

    def _run_output_handler(self) -> None:
        plain: OutputProcessor = self.output_processor
        if not isinstance(plain, NotingOutputProcessor):
            self.output_processor = NotingOutputProcessor(
                plain.tokenizer,
                log_stats=plain.log_stats,
                stream_interval=plain.stream_interval,
                tracing_enabled=plain.tracing_enabled,
                admission_stats=plain.admission_stats,
            )
        super()._run_output_handler()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **keywords: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate. For a flight: notes what it yields, and for one that arrives replays its known tokens first."""
        flight = current_flight.get()
        if flight is None:
            async for output in super().generate(prompt, sampling_params, request_id, **keywords):
                yield output
            return
        queue: RequestOutputCollector | None = None
        keywords |= self._ranked(flight)
        try:
            plain = await self.add_request(request_id, prompt, _marked(sampling_params, flight), **keywords)
            queue = self.noting.collector_of(plain)
            finished = False
            if flight.replay is not None:
                async for output in self._replay(flight, queue):
                    finished = output.finished
                    yield output
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                if output is not STREAM_FINISHED:
                    _note_yielded(flight, output, sampling_params)
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self._abort(queue)
            raise
        except (VLLMClientError, GracefulHTTPError):
            raise
        except EngineDeadError:
            flight.failed = True
            raise
        except Exception as error:
            flight.failed = True
            await self._abort(queue)
            raise EngineGenerateError from error
        finally:
            if queue is not None:
                queue.close()
                self.noting.forget(queue.request_id)

    def _ranked(self, flight: Flight) -> dict[str, int]:
        """Its place in the engine's queue, where that goes by priority: what the body says has become the tier, at the gateway."""
        return {"priority": flight.rank} if self.vllm_config.scheduler_config.policy == "priority" else {}

    @property
    def noting(self) -> NotingOutputProcessor:
        """The output processor, ours since the output handler was started."""
        assert isinstance(self.output_processor, NotingOutputProcessor)
        return self.output_processor

    async def _replay(self, flight: Flight, queue: RequestOutputCollector) -> AsyncGenerator[RequestOutput, None]:
        """Feed the known tokens one by one through vLLM's output processor, as if the engine had just made them.

        The known tokens of a request that is resumed may be all it ever had: then the last output says so, and the shell is let go.
        """
        assert flight.replay is not None
        request = self.noting.engine_requests[queue.request_id]
        known = KnownOutput(request, self.model_config.max_model_len, flight.prefill)
        async for batch in flight.replay.batches():
            for step in batch:
                self.output_processor.process_outputs([known.output(step)])
                output = queue.get_nowait()
                if output is not None:
                    flight.note_yielded(1)
                    yield output
                if not self.noting.has_request(request.request_id):
                    await self.engine_core.abort_requests_async([request.request_id])
                    return
        state = self.output_processor.request_states.get(queue.request_id)
        if state is not None and state.stats is not None and flight.history:
            # Without this vLLM's metrics would count the time before the move as one token gap.
            now = time.monotonic()
            state.stats.first_token_ts = state.stats.first_token_ts or now
            state.stats.last_token_ts = now

    async def _abort(self, queue: RequestOutputCollector | None) -> None:
        if queue is not None:
            await self.abort(queue.request_id, internal=True)


def _marked(params: SamplingParams, flight: Flight) -> SamplingParams:
    """The same parameters with our mark for the scheduler."""
    marked = params.clone()
    extra: Mapping[str, Any] = params.extra_args or {}
    mark = orders.Mark(tier=flight.tier, shell=flight.replay is not None)
    marked.extra_args = {**extra, orders.EXTRA_ARG: orders.to_extra(mark)}
    return marked


def _note_yielded(flight: Flight, output: RequestOutput, params: SamplingParams) -> None:
    tokens = sum(len(completion.token_ids) for completion in output.outputs)
    is_delta = params.output_kind == RequestOutputKind.DELTA
    flight.note_yielded(tokens if is_delta else max(0, tokens - flight.yielded))


def _steps(output: EngineCoreOutput) -> list[TokenStep]:
    figures = output.new_logprobs
    if figures is None:
        return [TokenStep(token) for token in output.new_token_ids]
    return [
        TokenStep(
            token,
            (
                tuple(figures.logprob_token_ids[row].tolist()),
                tuple(figures.logprobs[row].tolist()),
                int(figures.sampled_token_ranks[row]),
            ),
        )
        for row, token in enumerate(output.new_token_ids)
    ]
