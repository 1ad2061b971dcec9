"""Where the kernels of decode attention cut a sequence: the same rules as theirs, in plain Python.

The kernels' own are written in Triton, which a drawing must not need; see `contiguous.kernels` and `paged.kernels`. A
test holds these against them.
"""

FINE_PIECE, COARSE_PIECE, COARSE_FROM = 128, 512, 1024
"""Tokens between two cuts, before and from COARSE_FROM on."""


def cut_before(token: int) -> int:
    """Return the last cut at or before a token.

    Example:
        >>> [cut_before(token) for token in (127, 128, 1023, 1535, 1536)]
        [0, 128, 896, 1024, 1536]
    """
    fine = min(token, COARSE_FROM) // FINE_PIECE * FINE_PIECE
    return fine + max(token - COARSE_FROM, 0) // COARSE_PIECE * COARSE_PIECE


def piece_of(token: int) -> int:
    """Return the number of the piece that a token lies in.

    Example:
        >>> [piece_of(token) for token in (127, 128, 1023, 1024, 1536)]
        [0, 1, 7, 8, 9]
    """
    return min(token, COARSE_FROM) // FINE_PIECE + max(token - COARSE_FROM, 0) // COARSE_PIECE


def num_pieces(num_tokens: int) -> int:
    """Return into how many pieces a sequence is cut.

    Example:
        >>> num_pieces(128), num_pieces(129), num_pieces(1024), num_pieces(1025)
        (1, 2, 8, 9)
    """
    return piece_of(num_tokens - 1) + 1 if num_tokens else 0


def share_of(first: int, end: int, program: int, num_programs: int) -> tuple[int, int]:
    """Return where one program's share of the tokens from ``first`` to ``end`` begins and ends, both at cuts.

    The shares are equal but for the cuts: each begins at the last cut before it. An empty one has its end not behind
    its beginning.

    Example:
        >>> [share_of(0, 300, program, 3) for program in range(3)]
        [(0, 0), (0, 128), (128, 300)]
    """
    share = -(-(end - first) // num_programs)
    begin = first + program * share
    share_end = cut_before(begin + share) if begin + share < end else end
    return cut_before(begin), share_end if begin < end else 0
