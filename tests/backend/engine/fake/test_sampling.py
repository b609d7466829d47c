from dataclasses import replace

import pytest

from backend.engine.fake.sampling import RandomState, Sampling, next_step
from backend.engine.fake.vocabulary import CHOICES, EOS, forced_after

GREEDY = Sampling(10, eos_one_in=1)
READINGS = [bytes([i]) for i in range(50)]


def test_greedy_takes_the_likeliest_and_draws_nothing() -> None:
    random = RandomState(1)
    before = random.dump()
    step = next_step(replace(GREEDY, ignore_eos=True, logprobs=4), random, b"x", 1, 0)
    assert step.logprobs is not None
    tokens, values, rank = step.logprobs
    assert (tokens[0], tokens[1], rank, len(tokens)) == (step.token, step.token, 1, 5)
    assert list(values[1:]) == sorted(values[1:], reverse=True)
    assert random.dump() == before


def test_the_answer_ends_by_itself_unless_told_not_to() -> None:
    assert next_step(GREEDY, RandomState(0), b"x", 1, 0).token == EOS
    assert next_step(replace(GREEDY, ignore_eos=True), RandomState(0), b"x", 1, 0).token != EOS
    assert next_step(replace(GREEDY, min_tokens=3), RandomState(0), b"x", 1, 2).token != EOS
    assert next_step(replace(GREEDY, min_tokens=3), RandomState(0), b"x", 1, 3).token == EOS
    assert next_step(replace(GREEDY, eos_one_in=0), RandomState(0), b"x", 1, 3).token != EOS


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_tail_of_a_character_follows_its_head(temperature: float) -> None:
    head = next(t for t in range(1, CHOICES + 1) if forced_after(t) is not None)
    sampling = replace(GREEDY, temperature=temperature)
    assert {next_step(sampling, RandomState(5), reading, head, 5).token for reading in READINGS} == {forced_after(head)}


def test_a_seed_gives_the_same_tokens_and_another_one_others() -> None:
    sampling = Sampling(10, temperature=1.0)
    runs = []
    for seed in (3, 3, 4):
        random = RandomState(seed)
        runs.append([next_step(sampling, random, reading, 1, 0).token for reading in READINGS])
    assert runs[0] == runs[1] != runs[2]


def test_a_random_state_goes_on_where_it_was_dumped() -> None:
    first, second = RandomState(3), RandomState(99)
    first.draw()
    second.restore(first.dump())
    assert first.draw() == second.draw()
    with pytest.raises(ValueError, match="not a random state"):
        second.restore(b"short")
