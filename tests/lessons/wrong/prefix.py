"""Plausible wrong solutions of lesson 05, each with a piece of what its check says."""

import hashlib
import struct
from typing import Any

from minipaged.lessons.exercises.prefix import ReferenceClock, check_block_key, check_clock, check_find_blocks
from minipaged.prefix.block_key import block_key


def key_without_parent(parent: bytes, token_ids: Any) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def key_of_text(parent: bytes, token_ids: Any) -> bytes:
    return hashlib.sha256(parent + "".join(map(str, token_ids)).encode()).digest()


def key_in_hex(parent: bytes, token_ids: Any) -> str:
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def find_the_whole_prompt(names: dict[bytes, int], root: bytes, token_ids: list[int], block_size: int) -> list[int]:
    found, key = [], root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        key = block_key(key, token_ids[start : start + block_size])
        if key not in names:
            break
        found.append(names[key])
    return found


def find_behind_a_gap(names: dict[bytes, int], root: bytes, token_ids: list[int], block_size: int) -> list[int]:
    found, key = [], root
    for start in range(0, len(token_ids) - block_size, block_size):
        key = block_key(key, token_ids[start : start + block_size])
        if key in names:
            found.append(names[key])
    return found


class RestartingClock(ReferenceClock):
    def evict(self) -> int:
        self.hand = 0
        return super().evict()


class KeepsWhatItGivesUp(ReferenceClock):
    def evict(self) -> int:
        block_id = super().evict()
        self.is_marked[block_id] = True
        return block_id


class NoSecondChance(ReferenceClock):
    """Gives up the block under the hand, marked or not."""

    def evict(self) -> int:
        block_id = min([each for each in self.is_marked if each >= self.hand] or self.is_marked)
        self.hand = block_id + 1
        del self.is_marked[block_id]
        return block_id


WRONG = [
    (check_block_key, key_without_parent, "The parent's name stands for them"),
    (check_block_key, key_of_text, "Written side by side both are 123"),
    (check_block_key, key_in_hex, ".digest() gives bytes"),
    (check_find_blocks, find_the_whole_prompt, "leave at least the last token"),
    (check_find_blocks, find_behind_a_gap, "stop at the first name that is not there"),
    (check_clock, RestartingClock, "The hand"),
    (check_clock, KeepsWhatItGivesUp, "takes its block out"),
    (check_clock, NoSecondChance, "a marked block loses its mark and stays"),
]
