"""The bound of a text's tokens: never more than the tokenizer makes, and without tokenizing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_checkpoints import byte_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from edgellm.core.errors import RequestError
from edgellm.device_runtime.text.token_bound import TokenBound


def bytes_with(token: str, normalizer=None) -> Tokenizer:
    tokenizer = byte_tokenizer([token])
    tokenizer.normalizer = normalizer
    return tokenizer


CASES = {
    "short": bytes_with("<s>"),
    "NFC": bytes_with("<s>", normalizers.NFC()),
    "long": bytes_with("x" * 128, normalizers.Sequence([normalizers.NFKC()])),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ax é\u1100\u1161\u11a8\u0301👩", max_size=400))
def test_no_text_has_fewer_tokens(name, text):
    found = CASES[name].encode(text, add_special_tokens=False).ids
    assert TokenBound(CASES[name]).num_tokens(text) <= len(found)


def test_the_bound_is_near():
    assert TokenBound(CASES["short"]).num_tokens("a" * 12_000) == 1000


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True)),
        bytes_with("<s>", normalizers.Strip()),
        bytes_with("<s>", normalizers.Replace("a", "")),
    ],
)
def test_tokenizers_that_drop_characters_have_no_bound(tokenizer):
    assert TokenBound(tokenizer).num_tokens("a" * 10**6) == 0


def test_split_that_removes_has_no_bound():
    tokenizer = bytes_with("<s>")
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    assert TokenBound(tokenizer).num_tokens("a" * 10**6) == 0


def test_a_prompt_of_megabytes_is_rejected_by_its_characters():
    from types import SimpleNamespace

    from edgellm.device_runtime.engine.prompt import refuse_long

    engine = SimpleNamespace(max_input_len=1000)
    bound = TokenBound(CASES["long"])
    tokenizer = SimpleNamespace(num_tokens_at_least=bound.num_tokens)
    refuse_long("a" * 60_000, tokenizer, engine)
    refuse_long("a" * 500_000, tokenizer, engine)
    with pytest.raises(RequestError, match=r"2000000 characters.* 3906 tokens.* takes 1000"):
        refuse_long("a" * 2_000_000, tokenizer, engine)
