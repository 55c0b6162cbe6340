"""Acting: chat text as tokens, tool calls, one turn, and many trajectories side by side."""
