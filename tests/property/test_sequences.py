"""What holds of every repeated-block sequence, checked by brute force on its tokens alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from headstream.models.zoo.sequences import repeated_blocks

spans = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda pair: (min(pair), max(pair)))
blocks = spans.map(lambda span: (span[0] + 1, span[1] + 1))


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(2, 40),
    n_content=st.integers(8, 20),
    block=blocks,
    gap=spans,
    lead=spans,
    seed=st.integers(0, 10**6),
)
def test_masks_say_what_the_tokens_show(
    length: int,
    n_content: int,
    block: tuple[int, int],
    gap: tuple[int, int],
    lead: tuple[int, int],
    seed: int,
) -> None:
    generator = Generator().manual_seed(seed)
    made = repeated_blocks(
        3, length, n_content, generator=generator, block=block, gap=gap, lead=lead
    )
    assert made.tokens.shape == (3, length)
    assert made.tokens.dtype == torch.int64
    for row, predictable, fresh, source in zip(
        made.tokens.tolist(),
        made.predictable.tolist(),
        made.fresh.tolist(),
        made.source.tolist(),
    ):
        assert row[0] == 0
        assert all(1 <= token <= n_content for token in row[1:])
        for at in range(length):
            if at:
                assert fresh[at] == (row[at - 1] not in row[: at - 1])
            if not predictable[at]:
                assert source[at] == -1
                continue
            assert not fresh[at]
            # Every earlier copy of the query is followed by the same token: loss 0 is possible.
            earlier = [i for i in range(at - 1) if row[i] == row[at - 1]]
            assert earlier
            assert {row[i + 1] for i in earlier} == {row[at]}
            assert source[at] == earlier[-1] + 1
