import subprocess
import sys

import pytest
from pydantic import ValidationError

from backend.engine.fake.settings import FakeSettings
from backend.engine.shape import PrefillStyle


def test_the_environment_sets_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_FAKE_CAPACITY_BLOCKS", "600")
    monkeypatch.setenv("MIDSTREAM_FAKE_STYLE", "first")
    settings = FakeSettings()
    assert settings.shape().capacity_blocks == 600
    assert settings.shape().style is PrefillStyle.FIRST


def test_time_scales_every_cost() -> None:
    slow, fast = (FakeSettings.model_validate({"time_scale": scale}).shape().cost for scale in (2, 0))
    assert slow.decode_base_s == 2 * FakeSettings().decode_base_s
    assert fast.step_s(5, 1000, 100, 10000) == 0


@pytest.mark.parametrize("wrong", [{"capacity_blocks": 2}, {"kv_bytes_per_block": 100}, {"style": "last"}, {"max_batch": 0}])
def test_what_cannot_work_stops_it(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FakeSettings.model_validate(wrong)


def test_a_fake_engine_imports_neither_torch_nor_vllm() -> None:
    script = "import sys, backend.engine.fake.engine; sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
