"""Best-fit packing: whole documents into rows of a fixed number of tokens, none cut, none lost.

Documents are placed longest first, each into the fullest row that still has room for it. Order
inside a row and among rows comes from the seed alone. Everything is in memory: one integer a
document.
"""

from collections.abc import Sequence

import numpy as np


def pack_best_fit(lengths: Sequence[int], seq_len: int, seed: int) -> list[list[int]]:
    """Distributes documents over rows.

    Args:
        lengths: tokens of each document, each between 1 and `seq_len`.
        seq_len: most tokens of a row.
        seed: decides ties, the order of documents in a row and the order of the rows.

    Returns:
        The document indices of each row; every index occurs exactly once.

    Raises:
        ValueError: a length that no row can hold.
    """
    for i, length in enumerate(lengths):
        if not 1 <= length <= seq_len:
            raise ValueError(f"document {i} has {length} tokens, expected 1 to seq_len = {seq_len}")
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(lengths)).tolist()
    longest_first = sorted(shuffled, key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(seq_len + 1)]
    # Bit r is set where some row has room for exactly r tokens: the smallest room that is enough is
    # then one shift and one lowest bit, however many rows are open.
    rooms = 0
    for i in longest_first:
        enough = rooms >> lengths[i]
        if enough:
            room = lengths[i] + (enough & -enough).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
            rows[row].append(i)
        else:
            room, row = seq_len, len(rows)
            rows.append([i])
        left = room - lengths[i]
        rows_by_room[left].append(row)
        rooms |= 1 << left
    for row in rows:
        random.shuffle(row)
    order = random.permutation(len(rows))
    return [rows[i] for i in order]
