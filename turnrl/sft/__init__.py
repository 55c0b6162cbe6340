"""A cold start: a policy learns the form of its turns from demonstrations before RL begins."""
