"""Random inputs of the SSD scan, laid out as in the model."""

from torch import Tensor

from tests.kernel_check import normal


def inputs_of(
    tokens: int, heads: int = 4, groups: int = 2, width: int = 8, states: int = 16
) -> dict[str, Tensor]:
    """x, b and c lie in one wide tensor, dt in another, as in the model."""
    inputs = normal(
        1,
        xbc=(tokens, heads * width + 2 * groups * states),
        projected=(tokens, 5 + heads),
        a_log=(heads,),
        skip=(heads,),
        dt_bias=(heads,),
    )
    inputs["xbc"] *= 0.5
    inputs["dt_bias"] -= 1
    return inputs
