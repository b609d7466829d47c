"""Everything private of vLLM that we lean on, with the version it was read from, and a check that says clearly when one has moved.

Public extension points used besides: `scheduler_cls`, `worker_extension_cls`, `collective_rpc`, `SamplingParams.extra_args`.
"""

import importlib
import inspect
from dataclasses import dataclass

from vllm.version import __version__ as vllm_version

READ_FROM = "0.32.0"


@dataclass(frozen=True, slots=True)
class Name:
    """`path` is module:attribute(.attribute)*; `parameters` are those a callable must have; `why` is what we do with it."""

    path: str
    why: str
    parameters: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    """Names that the source of the class or function must mention (instance attributes, which no import shows)."""


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

NAMES: tuple[Name, ...] = (
    Name(
        _SCHEDULER,
        "the scheduler we subclass, and its queues",
        fields=(
            "self.requests",
            "self.running",
            "self.waiting",
            "self.kv_holding_waiting",
            "self.deferred_waiting",
            "self.kv_cache_manager",
            "self.structured_output_manager",
            "self.max_num_active_reqs",
            "self.max_model_len",
            "self.block_size",
            "self.finished_req_ids",
            "self.reset_preempted_req_ids",
        ),
    ),
    Name(f"{_SCHEDULER}.add_request", "overridden: shells and orders", ("request",)),
    Name(f"{_SCHEDULER}.schedule", "overridden: counts steps", ("throttle_prefills",)),
    Name(f"{_SCHEDULER}.update_from_output", "overridden: answers what waited for a step", ("scheduler_output", "model_runner_output")),
    Name(f"{_SCHEDULER}.finish_requests", "overridden: forgets shells and frozen requests", ("request_ids", "finished_status")),
    Name(f"{_SCHEDULER}.has_requests", "overridden: true while a grammar is awaited"),
    Name(f"{_SCHEDULER}._is_blocked_waiting_status", "where a thawed waiting request goes", ("status",)),
    Name(f"{_SCHEDULER}._enqueue_waiting_request", "where a thawed waiting request goes", ("request",)),
    Name(f"{_SCHEDULER}._holds_kv_blocks", "where a thawed waiting request goes", ("request",)),
    Name(f"{_SCHEDULER}._inflight_prefill_reserved_blocks", "memory a shell must leave to running prefills"),
    Name("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "the scheduler we subclass where vLLM schedules asynchronously"),
    Name(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "holds memory for a shell",
        ("request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks", "delay_cache_blocks", "reserved_blocks"),
    ),
    Name("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", "the destination's prefix cache", ("request",)),
    Name("vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids", "which blocks to copy", ("request_id",)),
    Name("vllm.v1.core.kv_cache_manager:KVCacheManager.free", "gives back what a shell need not keep", ("request",)),
    Name("vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks", "makes copied blocks known to the prefix cache"),
    Name("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks", "free memory, for load reports"),
    Name(
        "vllm.v1.request:Request",
        "state of one request",
        fields=(
            "self.num_in_flight_tokens",
            "self.num_output_placeholders",
            "self.num_computed_tokens",
            "self.num_preemptions",
            "self.is_prefill_chunk",
            "self.prefill_stats",
            "self.spec_token_ids",
            "self.structured_output_request",
            "self.num_prompt_tokens",
        ),
    ),
    Name("vllm.v1.request:Request.append_output_token_ids", "brings a shell to its last token", ("token_ids",)),
    Name("vllm.v1.structured_output:StructuredOutputManager.accept_tokens", "advances a shell's grammar", ("request", "new_token_ids")),
    Name("vllm.v1.structured_output.request:StructuredOutputRequest.is_grammar_ready", "when a shell's grammar is compiled"),
    Name(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "what the V1 runner remembers of a request; made for one that arrives",
        (
            "req_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "generator",
            "block_ids",
            "num_computed_tokens",
            "output_token_ids",
        ),
    ),
    Name(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "the V1 runner's memory",
        fields=("self.kv_caches", "self.requests", "self.sampler"),
    ),
    Name("vllm.v1.sample.sampler:Sampler", "draws for a resumed seeded request", fields=("self.topk_topp_sampler",)),
    Name("vllm.v1.core.sched.utils:check_stop", "where the known tokens of a resumed request end", ("request", "max_model_len")),
    Name(
        "vllm.v1.request:Request.from_engine_core_request", "where the known tokens of a resumed request end", ("request", "block_hasher")
    ),
    Name("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "the V2 runner's memory", fields=("self.kv_caches", "self.kv_cache_config")),
    Name("vllm.v1.engine.async_llm:AsyncLLM", "the engine client we subclass", fields=("self.output_processor", "self.engine_core")),
    Name("vllm.v1.engine.async_llm:AsyncLLM._run_output_handler", "overridden: the output processor is ours from the first token on"),
    Name("vllm.v1.engine.async_llm:AsyncLLM.add_request", "starts a flight's request", ("request_id", "prompt", "params")),
    Name("vllm.v1.engine.async_llm:AsyncLLM.abort", "ends a flight's request", ("request_id", "internal")),
    Name(
        "vllm.v1.engine.output_processor:OutputProcessor",
        "subclassed: notes tokens, replays known ones",
        ("tokenizer", "log_stats", "stream_interval", "tracing_enabled", "admission_stats"),
        fields=("self.request_states",),
    ),
    Name("vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "overridden", ("engine_core_outputs",)),
    Name("vllm.v1.engine.output_processor:OutputProcessor.add_request", "overridden", ("request",)),
    Name(
        "vllm.v1.engine.output_processor:RequestOutputCollector",
        "subclassed: hands over in order",
        fields=("self.ready", "self.request_id"),
    ),
    Name("vllm.v1.engine.output_processor:RequestOutputCollector.get_nowait", "overridden: one output at a time"),
    Name("vllm.v1.engine.output_processor:RequestState", "where its outputs go", fields=("self.queue", "self.parent_req", "self.stats")),
    Name("vllm.v1.engine:EngineCoreRequest", "an order's envelope", ("request_id", "sampling_params", "arrival_time")),
    Name(
        "vllm.v1.engine:EngineCoreOutput",
        "a replayed token",
        ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason", "prefill_stats"),
    ),
    Name(
        "vllm.v1.metrics.stats:PrefillStats",
        "what usage tells of a prefill that was computed elsewhere",
        ("num_cached_tokens", "num_cache_creation_tokens"),
    ),
    Name("vllm.v1.executor.uniproc_executor:UniProcExecutor", "computes in the engine core's process on CPUs (deploy/up.py)"),
    Name("vllm.envs:environment_variables", "whether responses are stored (VLLM_ENABLE_RESPONSES_API_STORE)"),
    Name("vllm.v1.outputs:LogprobsLists", "a replayed token's figures", ("logprob_token_ids", "logprobs", "sampled_token_ranks")),
    Name("vllm.entrypoints.launchers.app:build_app", "vLLM's OpenAI server", ("args", "supported_tasks", "model_config")),
    Name("vllm.entrypoints.launchers.api_server.app_state:init_app_state", "vLLM's OpenAI server", ("engine_client", "state", "args")),
    Name("vllm.entrypoints.launchers.cli_args:make_arg_parser", "vLLM's command line"),
    Name("vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args", "vLLM's command line"),
)


class VllmChanged(RuntimeError):
    """vLLM is another version than the one its internals were read from, or one of them has moved. Names what and why it matters."""


def check() -> None:
    """Raise VllmChanged, naming everything that is not as it was read."""
    problems = [problem for name in NAMES for problem in problems_of(name)]
    if problems:
        raise VllmChanged(f"vLLM {vllm_version} is not as Midstream knows it (read from {READ_FROM}):\n  " + "\n  ".join(problems))


def problems_of(name: Name) -> list[str]:
    """What is wrong with one name; empty if nothing is."""
    module_name, _, attributes = name.path.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for attribute in attributes.split("."):
            found = inspect.getattr_static(found, attribute)
    except (ImportError, AttributeError) as error:
        return [f"{name.path} is gone ({error}); needed for: {name.why}"]
    problems = []
    if name.parameters and callable(found):
        known = inspect.signature(found).parameters
        missing = [parameter for parameter in name.parameters if parameter not in known]
        if missing:
            problems.append(f"{name.path} has no {', '.join(missing)}; needed for: {name.why}")
    if name.fields and (inspect.isclass(found) or inspect.isfunction(found)):
        source = inspect.getsource(found)
        problems += [f"{name.path} does not mention {field}; needed for: {name.why}" for field in name.fields if field not in source]
    return problems
