"""The algorithm: an iteration collects trajectories, gives them credit and learns from them."""
