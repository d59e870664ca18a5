"""The simulated vocabulary: tokenizer, rows of next tokens, and folding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.adapters.simulated import model
from inference_svc.adapters.simulated.embedding import embedding

TOKENS = st.lists(st.integers(0, model.VOCABULARY_SIZE - 1), max_size=80)


@given(st.text(max_size=200))
def test_decoding_gives_the_encoded_text_back(text: str) -> None:
    ids = model.encode(text)
    assert model.decode(ids) == text
    assert len(ids) >= len(text.encode()) / model.TOKEN_BYTES_MAX


@given(st.text(alphabet="삼겹살 the龜", min_size=1, max_size=9), st.integers(0, 3))
def test_slices_of_a_long_text_lose_nothing(text: str, shift: int) -> None:
    long = "x" * shift + text * (2 * model.ENCODE_SLICE_BYTES // len(text.encode()) + 1)
    assert model.decode(model.encode(long)) == long


def test_tokens_cut_characters() -> None:
    ids = model.encode("삼겹살 🫠 龜")
    assert any(model.decode([token]).encode() != model.TOKEN_BYTES[token] for token in ids)


@given(state=st.integers(0, model.STATE_MASK), tokens=TOKENS)
def test_folding_many_tokens_equals_folding_each(state: int, tokens: list[int]) -> None:
    one_by_one = state
    for token in tokens:
        one_by_one = model.next_state(one_by_one, token)
    assert model.fold(state, tokens) == one_by_one


@given(state=st.integers(0, model.STATE_MASK), one=TOKENS, other=TOKENS)
def test_different_prefixes_have_different_states(
    state: int, one: list[int], other: list[int]
) -> None:
    assert (model.fold(state, one) == model.fold(state, other)) == (one == other)


@given(st.integers(0, model.STATE_MASK))
def test_generated_text_is_valid_at_every_length(state: int) -> None:
    row, tokens = 0, []
    for _ in range(60):
        choice = model.ROWS[row][state >> model.ROW_SHIFT]
        state = model.next_state(state, choice.token)
        row = choice.row
        tokens.append(choice.token)
        assert row == model.row_after(model.TOKEN_BYTES[token] for token in tokens)
        assert "\N{REPLACEMENT CHARACTER}" not in model.decode(tokens)


@given(tokens=TOKENS, block=st.integers(1, 20))
def test_a_block_key_depends_on_the_whole_prefix_and_the_salt(
    tokens: list[int], block: int
) -> None:
    keys = model.block_keys("salt", tokens, block)
    assert len(keys) == len(tokens) // block
    assert model.block_keys("salt", tokens[: len(keys) * block], block) == keys
    if keys:
        assert set(model.block_keys("other", tokens, block)).isdisjoint(keys)
        changed = [(tokens[0] + 1) % model.VOCABULARY_SIZE, *tokens[1:]]
        assert set(model.block_keys("salt", changed, block)).isdisjoint(keys)


def test_texts_that_share_words_are_nearer() -> None:
    def vector(text: str) -> list[float]:
        return embedding("model", model.encode(text), 64)

    def product(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    cat, cats, revenue = vector("a cat on the mat"), vector("the cat and a mat"), vector("profit")
    assert product(cat, cats) > 0.5 > abs(product(cat, revenue))
