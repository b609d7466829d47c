"""Building a vLLM engine that can migrate, and vLLM's own OpenAI server over it, from vLLM's own command line."""

import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__ as vllm_version

from backend.engine.vllm import agent_wire, internals
from backend.engine.vllm.agents import Agents
from backend.engine.vllm.client import MigratingLLM
from backend.engine.vllm.engine import EngineTimeouts, VllmEngine
from backend.engine.vllm.scheduler_link import SchedulerLink
from backend.engine.vllm.settings import KVSettings
from migration.messages import KVLayout

WORKER_EXTENSION = "backend.engine.vllm.agent.KVAgentExtension"
SCHEDULER = "backend.engine.vllm.scheduler.MigratingScheduler"
SHUTDOWN_S = 5.0
"""Seconds that the engine's processes get to end by themselves."""
ASYNC_SCHEDULER = "backend.engine.vllm.scheduler.MigratingAsyncScheduler"


def parse(argv: Sequence[str]) -> Namespace:
    """vLLM's own server arguments. Exits with vLLM's message if they are malformed."""
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM OpenAI-compatible server, as a Midstream backend."))
    args = parser.parse_args(list(argv))
    validate_parsed_serve_args(args)
    if args.scheduler_cls is not None or args.worker_extension_cls:
        parser.error("--scheduler-cls and --worker-extension-cls are taken by Midstream")
    for plugin, manager in (
        (args.tool_parser_plugin, ToolParserManager.import_tool_parser),
        (args.reasoning_parser_plugin, ReasoningParserManager.import_reasoning_parser),
    ):
        if plugin:
            manager(plugin)
    return args


@asynccontextmanager
async def open_engine(args: Namespace, settings: KVSettings, host: str) -> AsyncIterator[VllmEngine]:
    """Start the engine's processes and build its server app; stop them on leaving. `host` is where other workers reach ours."""
    internals.check()
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.worker_extension_cls = WORKER_EXTENSION
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    # Chosen after vLLM has decided whether to schedule asynchronously: the subclass must not change that.
    config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER if config.scheduler_config.async_scheduling else SCHEDULER
    with tempfile.TemporaryDirectory(prefix="midstream-") as directory:
        llm = MigratingLLM.from_vllm_config(
            vllm_config=config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=engine_args.enable_log_requests,
            aggregate_engine_logging=engine_args.aggregate_engine_logging,
            disable_log_stats=engine_args.disable_log_stats,
        )
        try:
            await llm.reset_mm_cache()
            yield await _assemble(llm, args, settings, directory, host)
        finally:
            llm.shutdown(timeout=max(config.shutdown_timeout, SHUTDOWN_S))


async def _assemble(llm: MigratingLLM, args: Namespace, settings: KVSettings, directory: str, host: str) -> VllmEngine:
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    block_tokens = int(llm.vllm_config.cache_config.block_size)
    agent_settings = agent_wire.AgentSettings(
        directory=directory,
        host=settings.host or host,
        timeout_s=settings.channel_timeout_s,
        chunk_bytes=settings.chunk_bytes,
        bytes_per_s=settings.bytes_per_s,
    )
    started = await llm.collective_rpc("midstream_start_agent", args=(msgspec.to_builtins(agent_settings),))
    ranks = tuple(sorted((msgspec.convert(one, agent_wire.Started) for one in started), key=lambda rank: rank.rank))
    link = SchedulerLink(llm.engine_core.add_request_async, f"ipc://{Path(directory) / 'news'}", settings.order_timeout_s)
    timeouts = EngineTimeouts(settings.order_timeout_s, settings.channel_timeout_s, settings.copy_timeout_s)
    return VllmEngine(llm, app, link, Agents(ranks), _layout(llm, ranks, block_tokens), timeouts)


def _layout(llm: MigratingLLM, ranks: tuple[agent_wire.Started, ...], block_tokens: int) -> KVLayout:
    config = llm.vllm_config
    names = config.model_config.served_model_name
    return KVLayout(
        model=names if isinstance(names, str) else names[0],
        dtype=f"{ranks[0].dtype}/{config.cache_config.cache_dtype}",
        block_tokens=block_tokens,
        block_bytes=ranks[0].block_bytes,
        layers=ranks[0].parts,
        ranks=len(ranks),
        shape=ranks[0].shape,
        version=f"vllm {vllm_version}",
    )
