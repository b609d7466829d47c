import pytest

from simulator.outcome import PER_REQUEST_HEADER, Outcome, RequestOutcome, Spread, longest_prompts, mean


def request(ttft_s: float, *, tier: str = "normal", prompt_tokens: int = 10, tpot_s: float | None = 0.1) -> RequestOutcome:
    return RequestOutcome(0.0, prompt_tokens, 5, tier, ttft_s, tpot_s, ttft_s + 1, 0.5, 1, 2, "i000")


def test_percentiles_are_by_nearest_rank() -> None:
    spread = Spread.of(float(n) for n in range(100, 0, -1))
    assert (spread.mean, spread.p50, spread.p99) == (50.5, 50.0, 99.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)
    assert mean([]) == 0.0


def test_the_summary() -> None:
    outcome = Outcome((request(1.0), request(3.0, tier="high", tpot_s=None)), (0.0, 0.5), 7, 16.0, 2.5)
    summary = outcome.to_json()
    assert list(summary) == [
        *["ttft_s", "tpot_s", "e2e_s", "preemption_loss_s", "preemptions", "fragmentation"],
        *["migrations", "instances_mean", "tiers", "wall_s"],
    ]
    assert summary["ttft_s"] == {"mean": 2.0, "p50": 1.0, "p99": 3.0}
    assert summary["tpot_s"] == {"mean": 0.1, "p50": 0.1, "p99": 0.1}
    assert (summary["preemption_loss_s"], summary["preemptions"], summary["fragmentation"]) == (0.5, 2, {"mean": 0.25})
    tiers = summary["tiers"]
    assert isinstance(tiers, dict)
    assert list(tiers) == ["high", "normal"]
    assert tiers["high"]["ttft_s"]["mean"] == 3.0
    assert tiers["high"]["preemptions"] == 1


def test_the_longest_prompts() -> None:
    requests = [request(1.0, prompt_tokens=n) for n in range(1, 301)]
    assert [each.prompt_tokens for each in longest_prompts(requests)] == [300, 299, 298]
    assert len(longest_prompts(requests[:5])) == 1


@pytest.mark.parametrize("tpot_s", [0.25, None])
def test_a_row_per_request(tpot_s: float | None) -> None:
    row = request(1.0, tpot_s=tpot_s).row()
    assert len(row) == len(PER_REQUEST_HEADER)
    assert row[5] == ("" if tpot_s is None else "0.250000")
