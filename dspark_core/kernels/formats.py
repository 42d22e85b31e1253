"""Kinds of numbers that packed weights are stored as, and how they lie."""

PANEL = 32  # outputs whose weights lie together
GROUP = 32  # inputs that share a scale

FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = range(5)
GROUPED = (INT8, INT4)  # with a scale for each group of inputs
# Bytes of one group of a panel.
GROUP_BYTES = {
    FLOAT32: GROUP * PANEL * 4,
    BFLOAT16: GROUP * PANEL * 2,
    FLOAT16: GROUP * PANEL * 2,
    INT8: PANEL * 2 + GROUP * PANEL,
    INT4: PANEL * 4 + GROUP * PANEL // 2,
}
NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16", FLOAT16: "float16", INT8: "int8", INT4: "int4"}
