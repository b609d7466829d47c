"""One simulation from beginning to end: a scenario in, an outcome out. Deterministic but for `wall_s`."""

from collections.abc import Callable, Sequence

from simulator.cluster import Cluster
from simulator.job import Job
from simulator.outcome import Outcome, RequestOutcome
from simulator.scenario import Scenario, ScenarioError
from simulator.workload import Arrival, generate


def arrivals_of(scenario: Scenario) -> list[Arrival]:
    """The workload of a scenario that names a trace. Raises ScenarioError if it names a file: reading it is the caller's."""
    load = scenario.workload
    if load.trace is None or load.rate is None:
        raise ScenarioError("the arrivals are in a file")
    return generate(load.trace, requests=load.requests, rate=load.rate, cv=load.cv, seed=load.seed, high_share=load.high_share)


def simulate(scenario: Scenario, arrivals: Sequence[Arrival], clock: Callable[[], float]) -> Outcome:
    """Run it; `clock` tells real seconds. Raises ScenarioError for a request that no instance could ever hold."""
    if not arrivals:
        raise ScenarioError("there is nothing to simulate: no request")
    started_s = clock()
    cluster = Cluster(scenario, arrivals)
    cluster.run()
    return Outcome(
        requests=tuple(_outcome(job) for job in cluster.jobs),
        fragmentation=tuple(cluster.fragmentations),
        migrations=cluster.rebalancer.migrations,
        instances_mean=cluster.instances_mean,
        wall_s=clock() - started_s,
    )


def _outcome(job: Job) -> RequestOutcome:
    arrival = job.arrival
    if job.first_token_s is None or job.finish_s is None:
        raise RuntimeError(f"request {job.id} never finished")
    later_tokens = arrival.output_tokens - 1
    return RequestOutcome(
        arrival_s=arrival.arrival_s,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        tier=arrival.tier,
        ttft_s=job.first_token_s - arrival.arrival_s,
        tpot_s=(job.finish_s - job.first_token_s) / later_tokens if later_tokens else None,
        e2e_s=job.finish_s - arrival.arrival_s,
        preemption_loss_s=job.lost_s,
        preemptions=job.preemptions,
        migrations=job.migrations,
        instance=job.place or "",
    )
