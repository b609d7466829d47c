from backend.llumlet.metrics import MAX_REASONS, LlumletMetrics
from migration.plan import MigrationOutcome, MigrationResult


def test_reasons_of_others_do_not_become_labels_without_end() -> None:
    metrics = LlumletMetrics()
    for number in range(10 * MAX_REASONS):
        metrics.count(MigrationOutcome(MigrationResult.REFUSED, f"reason_{number}", 1))
    series = [line for line in metrics.render().decode().splitlines() if line.startswith("midstream_migrations_total{")]
    assert len(series) == MAX_REASONS + 1
    assert sum(float(line.split()[-1]) for line in series) == 10 * MAX_REASONS
    assert any('reason="other"' in line for line in series)
