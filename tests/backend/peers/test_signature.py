"""The scheme by itself: what is accepted, and every way in which a request may differ from the one that was signed."""

from dataclasses import replace

import pytest

from backend.peers.signature import (
    Nonces,
    Question,
    Signature,
    SignatureError,
    hash_of,
    is_proof,
    prove,
    read_secrets,
    read_signature,
    sign,
    verify,
)

SECRET, OTHER = b"a" * 16, b"b" * 16
QUESTION = Question("POST", "10.0.0.1:8001", "/midstream/messages?a=1", ((b"X-Midstream-Request", b"R"), (b"accept", b"*/*")))
NONCE = "0" * 32
NOW_MS, WINDOW_MS = 1_000_000, 60_000


def signed(body: bytes = b"body") -> Signature:
    return sign(SECRET, QUESTION, body, time_ms=NOW_MS, nonce=NONCE)


def check(question: Question, signature: Signature, now_ms: int = NOW_MS, secrets: tuple[bytes, ...] = (SECRET,)) -> bytes:
    return verify(secrets, question, signature, now_ms=now_ms, window_ms=WINDOW_MS)


def test_what_was_signed_is_accepted_after_the_wire() -> None:
    read = read_signature(signed().text())
    assert read == signed()
    assert check(QUESTION, read) == SECRET
    assert read.body_sha256 == hash_of(b"body")


def test_headers_that_are_not_ours_may_change_on_the_way_and_so_may_their_order_and_case() -> None:
    arrived = replace(QUESTION, headers=((b"via", b"proxy"), (b"x-midstream-request", b"R"), (b"x-midstream-signature", b"v1;...")))
    assert check(arrived, signed()) == SECRET


@pytest.mark.parametrize(
    "change",
    [
        {"method": "GET"},
        {"authority": "10.0.0.2:8001"},
        {"target": "/midstream/messages?a=2"},
        {"headers": ((b"x-midstream-request", b"S"),)},
        {"headers": ()},
        {"headers": ((b"x-midstream-request", b"R"), (b"x-midstream-epoch", b"1"))},
    ],
)
def test_another_request_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(SignatureError) as refused:
        check(Question(**{**{name: getattr(QUESTION, name) for name in QUESTION.__slots__}, **change}), signed())
    assert refused.value.code == "bad_signature"


@pytest.mark.parametrize("change", [{"time_ms": NOW_MS + 1}, {"nonce": "1" * 32}, {"body_sha256": hash_of(b"other")}, {"mac": "0" * 64}])
def test_another_signature_is_refused(change: dict[str, object]) -> None:
    fields = {name: getattr(signed(), name) for name in Signature.__slots__}
    with pytest.raises(SignatureError):
        check(QUESTION, Signature(**{**fields, **change}))


@pytest.mark.parametrize("skew_ms", [-WINDOW_MS, 0, WINDOW_MS])
def test_clocks_may_differ_by_the_window(skew_ms: int) -> None:
    assert check(QUESTION, signed(), NOW_MS + skew_ms) == SECRET


@pytest.mark.parametrize("skew_ms", [-WINDOW_MS - 1, WINDOW_MS + 1])
def test_but_not_by_more(skew_ms: int) -> None:
    with pytest.raises(SignatureError) as refused:
        check(QUESTION, signed(), NOW_MS + skew_ms)
    assert refused.value.code == "stale_signature"


def test_a_secret_is_changed_by_accepting_two() -> None:
    assert check(QUESTION, signed(), secrets=(OTHER, SECRET)) == SECRET
    with pytest.raises(SignatureError):
        check(QUESTION, signed(), secrets=(OTHER,))
    assert read_secrets(f" {OTHER.decode()},{SECRET.decode()} ") == (OTHER, SECRET)
    assert read_secrets("") == ()
    with pytest.raises(ValueError):
        read_secrets("short")


@pytest.mark.parametrize("text", ["", "v1", "v2;1;" + "0" * 32, "v1;1;" + "0" * 32 + ";" + "0" * 64 + ";" + "z" * 64, "v1;-1;;;"])
def test_what_is_no_signature(text: str) -> None:
    with pytest.raises(SignatureError):
        read_signature(text)


def test_a_nonce_is_good_once_and_forgotten_when_its_signature_cannot_be_believed_any_more() -> None:
    nonces = Nonces(WINDOW_MS)
    nonces.note(NONCE, NOW_MS)
    for later_ms in (0, WINDOW_MS, 2 * WINDOW_MS):  # signed by a clock that is a window ahead, it is believed for two
        with pytest.raises(SignatureError) as refused:
            nonces.note(NONCE, NOW_MS + later_ms)
        assert refused.value.code == "replayed"
    nonces.note("1" * 32, NOW_MS + 2 * WINDOW_MS + 1)
    assert len(nonces) == 1


def test_a_proof_is_of_one_question_and_one_status() -> None:
    proof = prove(SECRET, NONCE, 200)
    assert is_proof((OTHER, SECRET), NONCE, 200, proof)
    assert not is_proof((SECRET,), NONCE, 500, proof)
    assert not is_proof((SECRET,), "1" * 32, 200, proof)
    assert not is_proof((OTHER,), NONCE, 200, proof)
    assert not is_proof((SECRET,), NONCE, 200, "é")
