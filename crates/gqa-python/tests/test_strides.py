"""Which strides of tensors are read where they are, and which are not."""

import pytest
from gqa._strides import of_blocks, of_tokens

SHAPE = 100, 16, 8, 128
# Keys of blocks as engines have them: alone, beside their values in each head, in each block, and
# head by head.
LAYOUTS = {
    "alone": (16384, 1024, 128),
    "halves of heads": (32768, 2048, 256),
    "halves of blocks": (32768, 1024, 128),
    "heads first": (32768, 256, 4096),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_engines_are_read(layout):
    strides = LAYOUTS[layout]
    assert of_blocks(SHAPE, (*strides, 1), 2, 16) == strides


@pytest.mark.parametrize(
    "strides",
    [
        (16384, 1024, 128, 2),  # elements of a head apart
        (16384, 1024, 64, 1),  # heads that overlap
        (0, 1024, 128, 1),  # one block for all
        (16388, 1024, 128, 1),  # 8 bytes
        (1 << 31, 1024, 128, 1),  # 2^32 bytes
        (25_000_008, 1024, 128, 1),  # rows in more than 2^31 units of 16 bytes
    ],
)
def test_what_kernels_cannot_read_is_not_taken_for_it(strides):
    count = 1000 if strides[0] == 25_000_008 else 100
    assert of_blocks((count, *SHAPE[1:]), strides, 2, 16) is None


def test_entries_that_follow_each_other_are_cut_into_blocks():
    shape = 4, 64, 8, 128
    assert of_blocks(shape, (65536, 1024, 128, 1), 2, 16) == (16384, 1024, 128)
    assert of_blocks(shape, (131072, 2048, 256, 1), 2, 16) == (32768, 2048, 256)
    assert of_blocks(shape, (131072, 1024, 128, 1), 2, 16) is None
    # One entry has nothing that follows it.
    assert of_blocks((1, *shape[1:]), (7, 1024, 128, 1), 2, 16) == (16384, 1024, 128)


def test_tokens_are_one_sequence_of_rows():
    assert of_tokens((7, 32, 128), (6144, 128, 1), 2) == (0, 6144, 128)
    assert of_tokens((3, 5, 32, 128), (30720, 6144, 128, 1), 2) == (0, 6144, 128)
    assert of_tokens((3, 1, 32, 128), (6144, 9, 128, 1), 2) == (0, 6144, 128)
    assert of_tokens((3, 5, 32, 128), (40000, 6144, 128, 1), 2) is None
    assert of_tokens((7, 32, 128), (6144, 129, 1), 2) is None
