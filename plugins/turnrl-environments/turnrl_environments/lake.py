"""A frozen lake with holes, in words: a world that pays for the way and for the goal."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Literal

from turnrl import RecipeError, ToolResult
from turnrl.plugin.errors import check_at_least, check_within

Move = Literal["left", "down", "right", "up"]
_MOVES: dict[Move, tuple[int, int]] = {
    "left": (0, -1),
    "down": (1, 0),
    "right": (0, 1),
    "up": (-1, 0),
}
_ENDS = {"H": "hole", "G": "goal"}
_TRIES = 100


class Lake:
    """Gymnasium's FrozenLake in words, for `Environment`. Each seed has its own map, start and
    goal.

    A step pays for coming nearer to the goal: the potential is the length of the shortest safe way,
    divided by its length from the start. So a step back costs as much as the step forward paid, and
    the steps of an attempt that reaches the goal pay 1 together. A hole ends the attempt and takes
    back all that its steps had paid, so falling never pays. `get_reward` pays 1 at the goal.

    Args:
        size: Rows and columns of a map.
        ice: Share of places without a hole.
        way: The fewest moves from the start to the goal of any map; a map needs at most two more.
        slippery: True if a move may slip to a side, as in FrozenLake.
    """

    def __init__(
        self, size: int = 6, ice: float = 0.85, way: int = 6, slippery: bool = False
    ) -> None:
        self.size, self.ice, self.way, self.slippery = size, ice, way, slippery
        check_at_least(2, "Lake.", self, "size", whole=True, optional=False)
        check_at_least(1, "Lake.", self, "way", whole=True, optional=False)
        check_within(0.5, 1, "Lake.", self, "ice")

    def reset(self, seed: int) -> str:
        """Draw a new map, and describe the surroundings of the start."""
        lake, random_map = _frozen_lake()
        rng = random.Random(seed)
        for _ in range(_TRIES):
            drawn = random_map(self.size, self.ice, rng.randrange(2**32))
            self.places: list[list[str]] = [[*row] for row in drawn]
            if self._set_out(rng):
                break
        else:
            raise RecipeError(
                f"no map of Lake.size {self.size} with Lake.ice {self.ice} has a way of "
                f"{self.way} to {self.way + 2} moves. Lower Lake.way."
            )
        maps = ["".join(row) for row in self.places]
        self.env = lake(desc=maps, is_slippery=self.slippery)
        self.at: int = self.env.reset(seed=seed)[0]
        self.way_from_start = self.ways[self.at]
        return self._seen()

    def step(self, action: Move) -> ToolResult:
        """Move one place: left, down, right or up. Reach the goal, and keep away from holes."""
        before = self.ways[self.at]
        self.at, _, ended, _, _ = self.env.step(list(_MOVES).index(action))
        after = self.ways.get(self.at, max(before, self.way_from_start))  # a hole has no way
        return ToolResult(self._seen(), reward=(before - after) / self.way_from_start, done=ended)

    def get_reward(self) -> float:
        """1 at the goal, else 0."""
        return float(self.at == self.goal)

    def _set_out(self, rng: random.Random) -> bool:
        """Choose a goal, and a start at the right distance; False if there is none."""
        for row in self.places:
            row[:] = ["F" if place in "SG" else place for place in row]
        free = [place for place in range(self.size**2) if self._place(place) == "F"]
        self.goal = rng.choice(free)
        self.ways = self._ways()
        starts = [place for place, way in self.ways.items() if 0 <= way - self.way <= 2]
        for mark, place in (("G", self.goal), ("S", rng.choice(starts or [self.goal]))):
            at, column = divmod(place, self.size)
            self.places[at][column] = mark
        return bool(starts)

    def _place(self, place: int) -> str:
        row, column = divmod(place, self.size)
        return self.places[row][column]

    def _is_hole(self, place: int) -> bool:
        return self._place(place) == "H"

    def _near(self, place: int, move: Move) -> int | None:
        """The place that a move leads to; None if there is a wall."""
        (row, column), (down, right) = divmod(place, self.size), _MOVES[move]
        inside = 0 <= row + down < self.size and 0 <= column + right < self.size
        return place + down * self.size + right if inside else None

    def _seen(self) -> str:
        """The directions without a hole or a wall, and the distance of the goal, in few words."""
        if (mark := self._place(self.at)) in _ENDS:
            return f"you are in the {_ENDS[mark]}"
        ways = {move: self._near(self.at, move) for move in _MOVES}
        safe = [move for move, to in ways.items() if to is not None and not self._is_hole(to)]
        (row, column), goal = divmod(self.at, self.size), divmod(self.goal, self.size)
        down, right = goal[0] - row, goal[1] - column
        ahead = [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
        ahead += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
        return f"ice {', '.join(safe)}; goal {', '.join(ahead)}"

    def _ways(self) -> dict[int, int]:
        """The length of the shortest safe way to the goal, from each place that has a way."""
        ways, reached = {self.goal: 0}, deque([self.goal])
        while reached:
            place = reached.popleft()
            for near in (self._near(place, move) for move in _MOVES):
                if near is not None and near not in ways and not self._is_hole(near):
                    ways[near] = ways[place] + 1
                    reached.append(near)
        return ways


def _frozen_lake() -> tuple[Any, Any]:
    """The environment's class, and the function that makes maps. Gymnasium is optional."""
    try:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
    except ImportError as error:
        raise RecipeError(
            "Lake needs gymnasium. Run \"pip install '.[environments]'\" in your clone of turnrl."
        ) from error
    return FrozenLakeEnv, generate_random_map
