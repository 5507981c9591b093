"""Messages between stages: their types, the largest of each pair, and where to measure them."""

from stage_programs import layers

from plait.backends.messages import (
    largest_messages,
    message_types,
    num_bytes,
    stage_elsewhere,
)


def test_one_for_each_pair_of_stages() -> None:
    program = layers([3, 4, 5, 4], skip=(0, 2))
    found = {pair: num_bytes(types) for pair, types in largest_messages(program).items()}
    row = 2 * 4  # rows, bytes
    # 4 wide behind stage 0, to stage 2 too; 5 wide behind stage 1
    assert found == {
        (0, 1): 4 * row,
        (0, 2): 4 * row,
        (1, 0): 4 * row,
        (1, 2): 5 * row,
        (2, 0): 4 * row,
        (2, 1): 5 * row,
    }
    assert [str(t) for t in message_types(program, 1, 2, "activation")] == ["f32[2, 5]"]
    assert message_types(program, 2, 0, "activation") == []


def test_a_message_within_a_rank_is_measured_between_two() -> None:
    v_shape = (0, 1, 1, 0)
    assert stage_elsewhere(v_shape, 0, 1) == 1
    assert stage_elsewhere(v_shape, 1, 2) == 0
    assert stage_elsewhere(v_shape, 3, 2) == 2
    assert stage_elsewhere((0, 0), 0, 1) == 1
