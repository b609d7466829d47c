"""PURE. How much memory is free, would satisfy those who wait for memory, and does not, because it is split over instances."""

from collections.abc import Iterable

from gateway.policy.view import ClusterView


def fragmentation(cluster: ClusterView, line_heads: Iterable[int]) -> float:
    """That memory as a share of all.

    Who waits: the head of each instance's queue that does not fit there, and the first of the line, at most one per instance in all.
    The smallest demands are satisfied first, as long as the cluster's free memory lasts.
    """
    reports = [view.report for view in cluster.instances]
    total = sum(report.capacity_tokens for report in reports)
    free = sum(report.free_tokens for report in reports)
    largest = max((report.free_tokens for report in reports), default=0)
    heads = [report.head_tokens for report in reports if report.head_tokens > report.free_tokens]
    heads += [tokens for tokens in line_heads if tokens > largest][: max(0, len(reports) - len(heads))]
    wasted = 0
    for tokens in sorted(heads):
        if wasted + tokens > free:
            break
        wasted += tokens
    return wasted / total if total else 0.0
