import pytest

from backend.registry.address import checked


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://u:p@h", "unix:///run/redis.sock", "memory://"])
def test_an_address_is_left_as_it_is(url: str) -> None:
    assert checked(url) == url


@pytest.mark.parametrize("url", ["", "h:6379", "http://h", "redis:/h", "secret@h"])
def test_what_is_none_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ValueError, match="begins with redis://, rediss://, unix:// or memory://") as refused:
        checked(url)
    assert not url or url not in str(refused.value)
