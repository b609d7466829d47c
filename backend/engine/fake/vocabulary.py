"""PURE. The fake model's tokens: which bytes each stands for, and how a prompt becomes tokens.

0                        end of sequence
1 .. CHOICES             what the model may choose (words, punctuation, CJK, emoji, heads of characters)
CHOICES+1 .. TEXT_TOKENS-1   tails: the second half of a character whose first half is a head; they follow it always
TEXT_TOKENS ..           prompt tokens, four bytes of text each; they stand for no text
"""

EOS = 0

_WORDS = (
    " river| stream| bank| stone| bridge| horse| rider| current| shore| boat| oar| rope| ford| mill| wheel| reed| heron| trout| otter"
    "| the| a| of| and| to| in| over| under| across| between| while| before| after| again| never| always| slowly| gently| still| once"
    "| carries| moves| crosses| follows| turns| waits| holds| lets go| reaches| returns"
    '|,|.|;|:|!|?|\n|\n\n| —| (|)| "|"|\'s| 42| 1999| [DONE]| data:| <b>|</b>'
    "|water|河流|中流|换马|水|桥|流れ|川を渡る|馬|강물|다리|é| naïve| Ünder| façade| мост| река"
    "|🐎|🌊| 🌉|👩‍🚀|🇫🇷|👍🏽"
)
_SPLIT = ("🐴", "𠮷", "橋", "岸", "𝒻")
"""Characters that come in two tokens, cut in the middle of their UTF-8."""

_HEADS = tuple(character.encode()[:2] for character in _SPLIT)
_TAILS = tuple(character.encode()[2:] for character in _SPLIT)
_PIECES = (b"", *(word.encode() for word in _WORDS.split("|")), *_HEADS, *_TAILS)

CHOICES = len(_PIECES) - len(_TAILS) - 1
"""How many tokens the model chooses from. A prime, so that any stride visits all of them."""
TEXT_TOKENS = len(_PIECES)
_PROMPT_TOKENS = 100_000
VOCABULARY = TEXT_TOKENS + _PROMPT_TOKENS
"""Token ids are below this."""

_PROMPT_TOKEN_BYTES = 4


def piece(token: int) -> bytes:
    """The bytes a token stands for: none for the end of sequence and for prompt tokens."""
    return _PIECES[token] if token < TEXT_TOKENS else b""


def label(token: int) -> str:
    """A token as text, for log-probabilities; half a character reads as the replacement character."""
    return piece(token).decode(errors="replace") if 0 < token < TEXT_TOKENS else f"<{token}>"


def forced_after(token: int) -> int | None:
    """The tail that must follow a head; None after any other token."""
    first_head = CHOICES - len(_HEADS) + 1
    return token + len(_HEADS) if first_head <= token <= CHOICES else None


def tokenize(text: str) -> tuple[int, ...]:
    """A prompt's tokens: at least one."""
    raw = text.encode(errors="surrogatepass") or b"\0"
    return tuple(
        TEXT_TOKENS + int.from_bytes(raw[at : at + _PROMPT_TOKEN_BYTES], "big") % _PROMPT_TOKENS
        for at in range(0, len(raw), _PROMPT_TOKEN_BYTES)
    )
