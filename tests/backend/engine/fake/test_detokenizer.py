from backend.engine.fake.detokenizer import Detokenizer, StopRule
from backend.engine.fake.vocabulary import CHOICES, EOS, TEXT_TOKENS, VOCABULARY, forced_after, label, piece, tokenize

BY_PIECE = {piece(token): token for token in range(1, TEXT_TOKENS)}


def token(text: str) -> int:
    return BY_PIECE[text.encode()]


def test_the_model_chooses_from_a_prime_number_of_tokens() -> None:
    assert all(CHOICES % divisor for divisor in range(2, CHOICES))


def test_pieces_are_distinct_and_heads_with_their_tails_are_characters() -> None:
    assert len(BY_PIECE) == TEXT_TOKENS - 1
    heads = [t for t in range(1, CHOICES + 1) if forced_after(t) is not None]
    tails = [forced_after(t) for t in heads]
    assert tails == list(range(CHOICES + 1, TEXT_TOKENS))
    for head, tail in zip(heads, tails, strict=True):
        assert tail is not None
        assert len((piece(head) + piece(tail)).decode()) == 1
        assert label(head) == "\N{REPLACEMENT CHARACTER}"
    assert forced_after(EOS) is None


def test_prompts_become_tokens_outside_the_text_ones() -> None:
    tokens = tokenize("river 🌊 river 🌊")
    assert len(tokens) == 6
    assert all(TEXT_TOKENS <= t < VOCABULARY for t in tokens)
    assert tokenize("") == tokenize("\0")
    assert tokenize("a") != tokenize("b")


def test_half_a_character_waits_for_its_other_half() -> None:
    text = Detokenizer(StopRule())
    head = next(t for t in range(1, CHOICES + 1) if forced_after(t) is not None)
    tail = forced_after(head)
    assert tail is not None
    assert text.push(head) is None
    assert text.take(ended=False) == ""
    text.push(tail)
    assert text.take(ended=False) == "🐴"


def test_a_stop_string_over_several_tokens_is_held_back_and_cut() -> None:
    text = Detokenizer(StopRule((" horse.", "!?")))
    assert text.push(token(" river")) is None
    assert text.take(ended=False) == ""
    assert text.push(token(" horse")) is None
    assert text.take(ended=False) == " river"
    assert text.push(token(".")) == " horse."
    assert text.take(ended=True) == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    text = Detokenizer(StopRule((" horse.",)))
    text.push(token(" horse"))
    assert text.take(ended=False) == ""
    assert text.take(ended=True) == " horse"


def test_the_earliest_of_several_stop_strings_counts() -> None:
    text = Detokenizer(StopRule(("r", "i")))
    assert text.push(token(" river")) == "r"
    assert text.take(ended=True) == " "


def test_an_included_stop_string_is_part_of_the_text() -> None:
    text = Detokenizer(StopRule((" horse.",), include=True))
    text.push(token(" horse"))
    assert text.take(ended=False) == " horse"
    assert text.push(token(".")) == " horse."
    assert text.take(ended=True) == "."


def test_stop_strings_are_not_looked_for_in_the_first_tokens() -> None:
    text = Detokenizer(StopRule((".",), min_tokens=2))
    assert text.push(token(".")) is None
    assert text.push(token(".")) is None
    assert text.push(token(".")) == "."
    assert text.take(ended=True) == ".."
