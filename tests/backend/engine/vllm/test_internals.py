"""The private names of vLLM that we lean on exist and have the shape we assume; if not, one failure names them."""

import pytest

pytest.importorskip("vllm", reason="the light environment has no vllm")

from vllm.version import __version__ as vllm_version  # after the skip

from backend.engine.vllm import internals
from deploy.up import CPU_EXECUTOR


def test_vllm_is_as_we_know_it() -> None:
    internals.check()


def test_vllm_is_the_version_we_read() -> None:
    assert vllm_version.startswith(internals.READ_FROM)


def test_the_executor_that_midstream_up_names_is_among_them() -> None:
    assert CPU_EXECUTOR in [name.path.replace(":", ".") for name in internals.NAMES]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (internals.Name("vllm.v1.request:Request.vanished", "a test"), "vllm.v1.request:Request.vanished is gone"),
        (internals.Name("vllm.v1.nowhere:Request", "a test"), "vllm.v1.nowhere:Request is gone"),
        (internals.Name("vllm.v1.request:Request.append_output_token_ids", "a test", ("tokens",)), "has no tokens"),
        (internals.Name("vllm.v1.request:Request", "a test", fields=("self.soul",)), "does not mention self.soul"),
    ],
)
def test_what_has_moved_is_named_with_what_it_was_for(name: internals.Name, complaint: str) -> None:
    problems = internals.problems_of(name)
    assert len(problems) == 1
    assert complaint in problems[0]
    assert "a test" in problems[0]
