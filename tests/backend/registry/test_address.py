import pytest

from backend.registry.address import MEMORY, checked_redis, checked_store


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://u:p@h", "unix:///run/redis.sock"])
def test_an_address_is_left_as_it_is(url: str) -> None:
    assert checked_redis(url) == checked_store(url) == url


@pytest.mark.parametrize("url", ["", "h:6379", "http://h", "redis:/h", "secret@h", "memory://there"])
def test_what_is_none_is_refused_without_being_shown(url: str) -> None:
    for check in (checked_redis, checked_store):
        with pytest.raises(ValueError, match="begins with redis://, rediss:// or unix://") as refused:
            check(url)
        assert not url or url not in str(refused.value)


def test_only_a_gateway_may_keep_its_store_to_itself() -> None:
    assert checked_store(MEMORY) == MEMORY
    with pytest.raises(ValueError, match="of a Redis"):
        checked_redis(MEMORY)
